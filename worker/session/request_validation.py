"""Checks the request fields that this worker serves, and converts parameters.

A field that is set but not listed is refused with UNIMPLEMENTED and its name. In a Submit that ends its own sequence
only.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import InvalidFieldError
from common.limits import (
    MAX_ADOPTION_KEY_BYTES,
    MAX_CACHE_SALT_BYTES,
    MAX_STOP_TOKEN_SEQUENCE,
    MAX_STOP_TOKEN_SEQUENCES,
)
from common.params.sampling_masks import check_bias_ids, check_tokens_left
from common.params.sampling_params import LOGPROB_FIELDS, SamplingParams
from common.wire.sampling_protos import SAMPLING_FIELDS, sampling_from_proto
from worker.engine.sequence import Priority


def _below(prefix: str, names: frozenset[str]) -> frozenset[str]:
    return frozenset({prefix, *(f"{prefix}.{name}" for name in names)})


# Paths in SessionRequest. A Submit is checked sequence by sequence.
SESSION: Final = (
    _below("hello", frozenset({"proto_minor", "router_id", "lease_ms", "live", "live.rid", "live.have", "kv_seq"}))
    | _below("submit", frozenset({"seqs", "serial", "more"}))
    | _below("extend", frozenset({"rid", "token_ids", "more"}))
    | _below("cancel", frozenset({"rids"}))
    | _below("lane", frozenset({"oldest_age_ms", "tokens", "seqs", "kv_epoch"}))
    | _below("adopt", frozenset({"rid", "key", "have", "digest", "deadline_left_ms"}))
)
# Paths in SubmitSequence.
SEQUENCE: Final = frozenset(
    {
        "rid",
        "prompt_len",
        "token_ids",
        "more",
        "seed",
        "choice",
        "deadline_left_ms",
        "traceparent",
        "tracestate",
        "chain_hash",
        "cache_salt",
        "priority",
        "keep",
        "logits_every",
        "expects_kv",
        "shares_prompt",
        "pooling",
        "adoption_key",
        "request_id",
        "tenant",
    }
) | _below("params", SAMPLING_FIELDS)
# Paths in GenerateRequest.
# Logprobs are for routers, which take them in parts.
GENERATE: Final = frozenset({"request_id", "token_ids", "seed", "cache_salt", "priority"}) | _below(
    "params", SAMPLING_FIELDS - set(LOGPROB_FIELDS)
)
DRAIN: Final = frozenset({"deadline_ms"})
LIST_STEPS: Final = frozenset({"last", "request_id", "before"})
SET_INTAKE: Final = frozenset({"intake"})
INTAKES: Final = frozenset({wpb.INTAKE_OPEN, wpb.INTAKE_CORDONED, wpb.INTAKE_EVICTING})


def check_token_ids(path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Checks that all ids are in [0, vocab_size).

    Raises:
        InvalidFieldError: names the first id that is not.
    """
    if token_ids and max(token_ids) >= vocab_size:
        at = next(i for i, token in enumerate(token_ids) if token >= vocab_size)
        raise InvalidFieldError(f"{path}[{at}]", f"is {token_ids[at]}", f"0 to {vocab_size - 1}")


def check_cache_salt(cache_salt: bytes) -> None:
    """Checks the length of a salt.

    Raises:
        InvalidFieldError: the salt is too long.
    """
    if len(cache_salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidFieldError("cache_salt", f"has {len(cache_salt)} bytes", f"at most {MAX_CACHE_SALT_BYTES}")


def check_adoption_key(path: str, key: bytes) -> None:
    """Checks the length of an adoption key.

    Raises:
        InvalidFieldError: the key is too long.
    """
    if len(key) > MAX_ADOPTION_KEY_BYTES:
        raise InvalidFieldError(path, f"has {len(key)} bytes", f"at most {MAX_ADOPTION_KEY_BYTES}")


def priority(given: wpb.Priority.ValueType) -> Priority:
    """The priority class of a sequence. `refuse_unserved` has refused unknown values before."""
    return Priority(given) if given else Priority.NORMAL


def sampling_params(params: wpb.SamplingParams, vocab_size: int, eos_token_ids: Set[int]) -> SamplingParams:
    """The parameters of a sequence.

    Raises:
        InvalidFieldError: one is out of range; named as in this proto.
    """
    try:
        made = sampling_from_proto(params)
        check_ids(made, vocab_size)
        check_tokens_left(made, vocab_size, eos_token_ids)
    except InvalidFieldError as error:
        violation = error.violations[0]
        path = violation.path.replace("sampling_params", "params", 1)
        raise InvalidFieldError(path, violation.problem, violation.valid) from None
    return made


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Checks that the model has all ids of the parameters, and the number of stop sequences.

    Raises:
        InvalidFieldError: an id is unknown, or there are too many stop sequences.
    """
    _check_stop_token_sequences(params, vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(f"sampling_params.{name}", getattr(params, name), vocab_size)
    check_bias_ids(params, vocab_size)
    for i, sequence in enumerate(params.bad_words_token_ids):
        check_token_ids(f"sampling_params.bad_words_token_ids[{i}].ids", sequence, vocab_size)
    _check_logprob_ids(params, vocab_size)


def _check_stop_token_sequences(params: SamplingParams, vocab_size: int) -> None:
    path = "sampling_params.stop_token_sequences"
    if len(params.stop_token_sequences) > MAX_STOP_TOKEN_SEQUENCES:
        count = len(params.stop_token_sequences)
        raise InvalidFieldError(path, f"has {count} entries", f"at most {MAX_STOP_TOKEN_SEQUENCES}")
    for i, sequence in enumerate(params.stop_token_sequences):
        if not 1 <= len(sequence) <= MAX_STOP_TOKEN_SEQUENCE:
            raise InvalidFieldError(f"{path}[{i}]", f"has {len(sequence)} ids", f"1 to {MAX_STOP_TOKEN_SEQUENCE}")
        check_token_ids(f"{path}[{i}].ids", sequence, vocab_size)


def _check_logprob_ids(params: SamplingParams, vocab_size: int) -> None:
    """Checks the ids whose logprobs are wanted, and that the vocabulary has as many tokens as are wanted."""
    check_token_ids("sampling_params.logprob_token_ids", params.logprob_token_ids, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            problem = f"is {getattr(params, name)}"
            raise InvalidFieldError(f"sampling_params.{name}", problem, f"at most {vocab_size}, the model's tokens")
