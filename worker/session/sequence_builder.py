"""Checks a request and builds its Sequence: the one way in, for Submit and direct Generate.

The check computes the hashes of a router's prompt, and the sequence keeps them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TypeAlias

from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import InvalidFieldError, NoOutputHeadError, PromptTooLongError
from common.params.pooling import LABELS, Pooling
from common.params.sampling_params import SamplingParams
from common.wire.block_hash import hash_chain, salt_root
from common.wire.heads import OUTPUT_HEAD, Head
from worker.engine.sequence import Sequence
from worker.session import request_validation

# Fields of both messages: token_ids, params, cache_salt, priority.
Request: TypeAlias = wpb.SubmitSequence | wpb.GenerateRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that a sequence is checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: longest prompt plus answer, in tokens.
        block_size: tokens per KV block.
        hash_seed: seed of the block hashes.
        weights_digest: of the model, part of the hashes of salted prompts.
        eos_token_ids: the model's end-of-sequence ids.
        model: its name.
        head: of the model.
        num_labels: of its classifier; else 0.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    hash_seed: int
    weights_digest: str = ""
    eos_token_ids: frozenset[int] = frozenset()
    model: str = ""
    head: Head = OUTPUT_HEAD
    num_labels: int = 0

    def hash_root(self, cache_salt: bytes) -> int | None:
        """Parent hash of the first block of a prompt with this salt, as the router computes it; None without a salt."""
        return salt_root(self.weights_digest.encode(), cache_salt=cache_salt, seed=self.hash_seed)


def check_sequence(request: Request, limits: EngineLimits) -> tuple[array[int], SamplingParams]:
    """Checks a request's own fields. Returns its first token ids and its parameters.

    Raises:
        ApiError: a field is out of range; named as in the proto.
    """
    token_ids = list(request.token_ids)
    request_validation.check_token_ids("token_ids", token_ids, limits.vocab_size)
    check_length(len(token_ids), limits)
    request_validation.check_cache_salt(request.cache_salt)
    params = request_validation.sampling_params(request.params, limits.vocab_size, limits.eos_token_ids)
    return array("I", token_ids), params


def check_length(num_tokens: int, limits: EngineLimits) -> None:
    """Checks that the part of a prompt that has arrived is no longer than a sequence may be.

    Raises:
        PromptTooLongError: it is longer.
    """
    if num_tokens > limits.max_model_len:
        raise PromptTooLongError("token_ids", num_tokens, limits.max_model_len)


def build_sequence(
    request: Request,
    token_ids: array[int],
    params: SamplingParams,
    limits: EngineLimits,
    *,
    prompt_len: int,
    seed: int,
    arrived: float,
    deadline: float | None,
    choice: int = 0,
    chain_hash: int | None = None,
    may_return: bool = False,
    logits_every: int = 0,
    shares_prompt: bool = False,
    pooling: Pooling | None = None,
) -> Sequence:
    """Makes the sequence of a complete request.

    Args:
        request: checked (`check_sequence`).
        token_ids: prompt, and output of earlier attempts.
        params, limits: of the request and of the engine.
        prompt_len: number of prompt tokens in `token_ids`.
        seed: of its random numbers.
        arrived, deadline: monotonic seconds; deadline None for never.
        choice: index of the answer.
        chain_hash: computed by the router; None without a router.
        may_return: True if it may be given back to the router before its first step (rule S9).
        logits_every, shares_prompt, pooling: as of Sequence.

    Raises:
        InvalidFieldError: `prompt_len` is not in the prompt, router and worker hash differently, or an embedding
            request would generate.
        PromptTooLongError: the prompt leaves no room for an answer.
        NoOutputHeadError: the sequence would generate, and the model has no output head.
    """
    _check_prompt_len(prompt_len, len(token_ids), limits)
    _check_pooling(pooling, limits, generates=params.max_tokens != 1 or prompt_len < len(token_ids))
    root = limits.hash_root(request.cache_salt)
    chain = None if chain_hash is None else check_chain_hash(token_ids[:prompt_len], chain_hash, limits, root)
    return Sequence(
        token_ids.tolist(),
        limits.block_size,
        params,
        num_prompt_tokens=prompt_len,
        seed=seed,
        choice=choice,
        arrive_time=arrived,
        deadline=deadline,
        hash_root=root,
        cache_salt=request.cache_salt,
        priority=request_validation.priority(request.priority),
        block_hashes=chain,
        packed_ids=token_ids.tobytes(),
        may_return=may_return,
        logits_every=logits_every,
        shares_prompt=shares_prompt,
        pooling=pooling,
    )


def _check_pooling(pooling: Pooling | None, limits: EngineLimits, *, generates: bool) -> None:
    if pooling is None and limits.head != OUTPUT_HEAD:
        raise NoOutputHeadError(limits.model)
    if pooling == LABELS and not limits.num_labels:
        raise InvalidFieldError("pooling", "is POOLING_LABELS of a model without a classifier", "a vector's")
    if pooling is not None and generates:
        raise InvalidFieldError("pooling", "stands beside tokens to generate", "a prompt alone, with max_tokens 1")


def _check_prompt_len(prompt_len: int, num_tokens: int, limits: EngineLimits) -> None:
    if not 1 <= prompt_len <= num_tokens:
        raise InvalidFieldError("prompt_len", f"is {prompt_len}", f"1 to {num_tokens}")
    if prompt_len >= limits.max_model_len:
        raise PromptTooLongError("token_ids", prompt_len, limits.max_model_len)


def check_chain_hash(prompt: Many[int], chain_hash: int, limits: EngineLimits, root: int | None) -> list[int]:
    """Checks that the router hashes blocks as this worker does (docs/explanation/determinism.md).

    Returns:
        The hashes of the prompt's full blocks.

    Raises:
        InvalidFieldError: hash seed, block size or tokens differ.
    """
    chain = hash_chain(prompt, limits.block_size, root=root, seed=limits.hash_seed)
    expected = chain[-1] if chain else 0
    if chain_hash != expected:
        raise InvalidFieldError(
            "chain_hash",
            f"is {chain_hash:#x}: hash seed, block size or tokens of router and worker differ",
            f"{expected:#x} for {len(prompt)} tokens in blocks of {limits.block_size}, seed {limits.hash_seed}",
        )
    return chain
