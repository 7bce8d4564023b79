"""OpenEngine's GenerateRequest and metadata as a DoorRequest. Pure.

A field that the engine does not serve is refused by its name; the table of docs/reference/openengine.md says for each
field what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from fissile.peers.openengine.v1 import openengine_pb2 as pb
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Value

from common.constraints.forms import CHOICES, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX
from common.errors import InvalidFieldError
from common.limits import MAX_REQUEST_ID_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from common.rpc.unsupported_fields import field_paths, refuse_unserved
from worker.doors.door_request import DoorRequest, EngineDoor
from worker.engine.sequence import Priority
from worker.session.kv_session import KvSession

# Names of our parameters, by the peer's fields in `sampling`.
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "num_sequences": "n",
}
_STOPPING: Final = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "include_stop_in_output": "include_stop_string",
}
_GUIDES: Final = {
    "json_schema": JSON_SCHEMA,
    "regex": REGEX,
    "ebnf_grammar": GRAMMAR,
    "choice": CHOICES,
    "json_object": JSON_OBJECT,
}
# The library that enforces guides here, under its own name; "" and "auto" leave the choice to the engine.
_BACKENDS: Final = ("", "auto", "llguidance")
_CANDIDATES: Final = ("top_n", "token_ids", "token_ids.ids")
DOOR: Final = EngineDoor(
    "openengine",
    {
        **{ours: f"sampling.{name}" for name, ours in _SAMPLING.items()},
        **{ours: f"stopping.{name}" for name, ours in _STOPPING.items()},
        **{f"constraint.{ours}": f"guided.{name}" for name, ours in _GUIDES.items()},
        "constraint.choices.texts": "guided.choice.choices",
        "constraint": "guided",
        "text": "prompt",
        "token_ids": "token_ids.ids",
        "stop_strings": "stopping.conditions",
        "stop_token_ids": "stopping.conditions",
        "logprobs": "response.output_candidates.top_n",
        "prompt_logprobs": "response.prompt_candidates.top_n",
        "prompt_logprobs_start": "response.prompt_logprob_start",
        "logprob_token_ids": "response.output_candidates.token_ids",
        "cache_salt": "kv.cache_salt",
        "session": "kv.session",
    },
)
GENERATE_SERVED: Final = frozenset(
    {
        "request_id",
        "model",
        "prompt",
        "token_ids",
        "token_ids.ids",
        "sampling",
        *(f"sampling.{name}" for name in _SAMPLING),
        "stopping",
        *(f"stopping.{name}" for name in _STOPPING),
        "stopping.conditions",
        "stopping.conditions.stop_text",
        "stopping.conditions.stop_token_id",
        "response",
        "response.return_prompt_logprobs",
        "response.return_output_logprobs",
        "response.prompt_logprob_start",
        "response.prompt_candidates",
        *(f"response.prompt_candidates.{name}" for name in _CANDIDATES),
        "response.output_candidates",
        *(f"response.output_candidates.{name}" for name in _CANDIDATES),
        "kv",
        "kv.bypass_prefix_cache",
        "kv.cache_salt",
        "kv.session",
        *(f"kv.session.{name}" for name in field_paths(pb.KvSessionRef.DESCRIPTOR)),
        "guided",
        *(f"guided.{name}" for name in _GUIDES),
        "guided.choice.choices",
        "guided.backend",
        # Engines may ignore its keys; `detokenize` and `request_type` are served.
        "extra",
    }
)
# The keys of the protocol, each with the range of its number; None for text.
_KEYS: Final[Mapping[str, tuple[int, int] | None]] = {
    "openengine-routing-key": None,
    "openengine-target-dp-rank": (0, 2**32 - 1),
    "openengine-priority": (-(2**31), 2**31 - 1),
}
_RESERVED: Final = "openengine-"
# Value of `extra.request_type` by which peers ask for a prefill alone.
_CONTEXT_ONLY: Final = "context_only"
# Tiers of a session that are read; a worker has one of each kind.
_MOST_STORES: Final = 16


def door_request(request: pb.GenerateRequest, metadata: Iterable[tuple[str, str | bytes]], dp_rank: int) -> DoorRequest:
    """The request as doors have it; values are checked later.

    Args:
        request: as the peer sent it.
        metadata: of the call.
        dp_rank: data-parallel rank of this engine.

    Raises:
        ApiError: a field is not served or cannot be read; named as in `request`.
    """
    refuse_unserved(request, GENERATE_SERVED)
    if request.WhichOneof("input") is None:
        raise InvalidFieldError("input", "is missing", "prompt or token_ids")
    if (bad := request.guided.backend) not in _BACKENDS:
        raise InvalidFieldError("guided.backend", f"is {bad!r}", "llguidance, auto, or none")
    params = {**_given(request.sampling, _SAMPLING), **_given(request.stopping, _STOPPING)}
    # Peers that know other engines send -1 for "off".
    if params.get("top_k") == -1:
        params["top_k"] = 0
    params.update(_conditions(request.stopping.conditions))
    params.update(_logprobs(request.response))
    params.update(_constraint(request.guided))
    detokenize = request.extra.fields.get("detokenize")
    request_type = request.extra.fields.get("request_type")
    is_context_only = request_type is not None and request_type.string_value == _CONTEXT_ONLY
    if is_context_only:
        # Peers keep the answer's `min_tokens` beside a `max_tokens` of 1.
        for name in ("max_tokens", "min_tokens"):
            params.pop(name, None)
    return DoorRequest(
        request.prompt if request.WhichOneof("input") == "prompt" else request.token_ids.ids,
        params,
        request_id=request.request_id,
        cache_salt=request.kv.cache_salt,
        reads_cache=not request.kv.bypass_prefix_cache,
        priority=_priority(metadata, dp_rank),
        returns_text=detokenize is None or detokenize.bool_value or detokenize.WhichOneof("kind") != "bool_value",
        keeps_stop_token=request.stopping.include_stop_in_output,
        is_context_only=is_context_only,
        session=kv_session(request.kv.session) if request.kv.HasField("session") else None,
    )


def kv_session(ref: pb.KvSessionRef) -> KvSession:
    """The session that a peer names; a session of another engine has neither tiers nor a root.

    Its rank is the one that computed the prompt. Every rank finds the same blocks in the tier.

    Raises:
        InvalidFieldError: it has no id.
    """
    empty = Value()
    stores = ref.attributes_struct.fields.get("stores", empty).list_value.values[:_MOST_STORES]
    root = ref.attributes_struct.fields.get("root", empty).string_value
    if not 1 <= len(ref.session_id.encode()) <= MAX_REQUEST_ID_BYTES:
        valid = f"1 to {MAX_REQUEST_ID_BYTES} bytes"
        raise InvalidFieldError("kv.session.session_id", "is missing or too long", valid)
    return KvSession(ref.session_id, tuple(each.string_value for each in stores), root, dp_rank=ref.dp_rank)


def candidate_ids(selection: pb.CandidateTokenSelection) -> list[int]:
    """Ids whose logprobs a selection shows."""
    return list(selection.token_ids.ids)


def _given(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    """Values of the fields that a message has, by our names."""
    return {ours: getattr(message, name) for name, ours in names.items() if message.HasField(name)}


def _conditions(conditions: Iterable[pb.StopCondition]) -> dict[str, Any]:
    """Stop strings and stop token ids, each once."""
    strings: dict[str, None] = {}
    ids: dict[int, None] = {}
    for i, condition in enumerate(conditions):
        kind = condition.WhichOneof("condition")
        if kind is None or (kind == "stop_text" and not condition.stop_text):
            raise InvalidFieldError(f"stopping.conditions[{i}]", "is empty", "stop_text or stop_token_id")
        if kind == "stop_text":
            strings[condition.stop_text] = None
        else:
            ids[condition.stop_token_id] = None
    for count, most, what in ((len(strings), MAX_STOP_STRINGS, "texts"), (len(ids), MAX_STOP_TOKEN_IDS, "token ids")):
        if count > most:
            raise InvalidFieldError("stopping.conditions", f"has {count} {what}", f"at most {most}")
    return {"stop_strings": tuple(strings), "stop_token_ids": tuple(ids)}


def _logprobs(response: pb.ResponseOptions) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ids: dict[int, None] = {}
    for kind, ours in (("output", "logprobs"), ("prompt", "prompt_logprobs")):
        candidates: pb.CandidateTokenSelection = getattr(response, f"{kind}_candidates")
        if getattr(response, f"return_{kind}_logprobs"):
            found[ours] = candidates.top_n
            ids.update(dict.fromkeys(candidate_ids(candidates)))
        elif response.HasField(f"{kind}_candidates"):  # type: ignore[arg-type]
            problem = f"is set without return_{kind}_logprobs"
            raise InvalidFieldError(f"response.{kind}_candidates", problem, "both or none")
    if ids:
        # One list for both kinds; each shows its own ids.
        found["logprob_token_ids"] = tuple(ids)
    if response.return_prompt_logprobs:
        found["prompt_logprobs_start"] = max(1, response.prompt_logprob_start)
    elif response.prompt_logprob_start:
        problem = "is set without return_prompt_logprobs"
        raise InvalidFieldError("response.prompt_logprob_start", problem, "both or none")
    return found


def _constraint(guided: pb.GuidedDecoding) -> dict[str, Any]:
    """The guide as a mapping of its form to its content, which is checked later; empty for none."""
    guide = guided.WhichOneof("guide")
    if guide is None:
        return {}
    form = _GUIDES[guide]
    if form == JSON_OBJECT:
        return {"constraint": {form: True}}
    content = list(guided.choice.choices) if form == CHOICES else getattr(guided, guide)
    return {"constraint": {form: content}}


def _priority(metadata: Iterable[tuple[str, str | bytes]], dp_rank: int) -> Priority:
    """Priority class of a call; checks the protocol's own metadata.

    Raises:
        InvalidFieldError: a key is unknown, repeated or malformed, or names another rank.
    """
    found: dict[str, str] = {}
    for key, value in metadata:
        if not key.startswith(_RESERVED):
            continue
        if key not in _KEYS or not isinstance(value, str):
            raise InvalidFieldError(f"metadata {key}", "is unknown", ", ".join(_KEYS))
        if key in found:
            raise InvalidFieldError(f"metadata {key}", "is given twice", "one value")
        found[key] = value
    numbers = {key: _number(key, value) for key, value in found.items()}
    rank = numbers.get("openengine-target-dp-rank", dp_rank)
    if rank != dp_rank:
        raise InvalidFieldError("metadata openengine-target-dp-rank", f"is {rank}", f"{dp_rank}, this engine's rank")
    given = numbers.get("openengine-priority", 0)
    return Priority.NORMAL if not given else Priority.HIGH if given > 0 else Priority.LOW


def _number(key: str, value: str) -> int:
    bounds = _KEYS[key]
    if bounds is None:
        if not value or not value.isascii() or not value.isprintable():
            raise InvalidFieldError(f"metadata {key}", "is empty or not printable", "ASCII text")
        return 0
    least, most = bounds
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10 and least <= int(value) <= most):
        raise InvalidFieldError(f"metadata {key}", f"is {value[:40]!r}", f"a whole number from {least} to {most}")
    return int(value)
