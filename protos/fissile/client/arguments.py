"""Types of the calls' keyword arguments, which have the names of the request fields in the protos.

The protos document each field. tests/unit/client/test_arguments.py checks that these types match the protos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

from fissile.v1 import inference_pb2 as pb

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | Mapping[str, str | bytes]
Messages: TypeAlias = str | Sequence[Mapping[str, Any] | pb.ChatMessage]
Prompt: TypeAlias = str | Sequence[int]
TokenIds: TypeAlias = Sequence[int] | pb.TokenIds
Json: TypeAlias = str | Mapping[str, Any]
PriorityName: TypeAlias = Literal["low", "normal", "high"] | pb.Priority.ValueType
_Function = TypeVar("_Function", bound=Callable[..., Any])


class ConnectionArguments(TypedDict, total=False):
    """Keyword arguments of a client: the attributes of `Connection`."""

    api_key: str
    tls: bool
    tls_ca: str | Path | None
    tls_name: str
    client_cert: tuple[str | Path, str | Path] | None
    metadata: Metadata
    options: Sequence[tuple[str, Any]]
    waits_when_full: bool


class ConstraintArguments(TypedDict, total=False):
    """Fields of Constraint, exactly one of them; a JSON Schema is a text or a mapping."""

    json_schema: Json
    json_object: bool
    regex: str
    grammar: str
    choices: Sequence[str] | pb.Choices | Mapping[str, Sequence[str]]


class ReceiptArguments(TypedDict, total=False):
    """Fields of ReceiptOptions."""

    logits_every: int


class ReasoningArguments(TypedDict, total=False):
    """Fields of ReasoningOptions."""

    separate: bool
    max_tokens: int


class ToolChoiceArguments(TypedDict, total=False):
    """Fields of ToolChoice, exactly one of them."""

    mode: Literal["auto", "none", "required"] | pb.ToolMode.ValueType
    name: str


class CallArguments(TypedDict, total=False):
    """Arguments of a call that are not fields of its request.

    `timeout_s` is the deadline of the whole answer, later attempts included; None sets no deadline. `metadata` is sent
    with this call alone, such as `traceparent`. `receipt` asks for a receipt of each answer, which the client checks.
    """

    timeout_s: float | None
    metadata: Metadata
    receipt: bool | ReceiptArguments | pb.ReceiptOptions


class SamplingArguments(TypedDict, total=False):
    """Fields of SamplingParams; None counts as an absent argument."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_strings: Sequence[str] | None
    include_stop_string: bool | None
    stop_token_ids: Sequence[int] | None
    stop_token_sequences: Sequence[TokenIds] | None
    n: int | None
    best_of: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    constraint: ConstraintArguments | pb.Constraint | None
    num_drafts: int | None


class OutputArguments(TypedDict, total=False):
    """Fields of OutputOptions except `receipt`, which is an argument of the call."""

    return_token_ids: bool | None
    logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    logprobs_kind: Literal["raw", "processed"] | pb.LogprobsKind.ValueType | None
    prompt_logprobs: int | None
    prompt_logprobs_start: int | None
    echo: bool | None
    keep_special_tokens: bool | None
    token_bytes: bool | None
    prompt_token_ids: bool | None


class AnyRequestArguments(TypedDict, total=False):
    """Fields that every request has."""

    model: str | None
    request_id: str | None
    priority: PriorityName | None
    session_id: str | None
    cache_salt: str | None


class AnswerArguments(CallArguments, SamplingArguments, OutputArguments, AnyRequestArguments, total=False):
    """Arguments of every call that generates; SamplingParams and OutputOptions may also be given as a whole."""

    sampling_params: pb.SamplingParams | SamplingArguments | None
    output_options: pb.OutputOptions | OutputArguments | None


class GenerateArguments(AnswerArguments, total=False):
    """Arguments of `generate` and `generate_stream` besides the prompt."""


class ChatArguments(AnswerArguments, total=False):
    """Arguments of `chat` and `chat_stream` besides the messages."""

    tools: Sequence[pb.Tool | Mapping[str, Any]] | None
    tool_choice: pb.ToolChoice | ToolChoiceArguments | None
    parallel_tool_calls: bool | None
    template_arguments_json: Json | None
    reasoning: pb.ReasoningOptions | ReasoningArguments | None


class PromptArguments(TypedDict, total=False):
    """Fields of ChatRequest that the prompt depends on, besides the messages."""

    model: str | None
    tools: Sequence[pb.Tool | Mapping[str, Any]] | None
    tool_choice: pb.ToolChoice | ToolChoiceArguments | None
    template_arguments_json: Json | None


class EmbedArguments(AnyRequestArguments, total=False):
    """Arguments of `embed` besides the inputs."""

    pooling: Literal["last", "mean"] | pb.Pooling.ValueType | None
    normalize: bool | None
    dimensions: int | None


class RerankArguments(AnyRequestArguments, total=False):
    """Arguments of `rerank` besides query and documents."""

    top_n: int | None
    instruction: str | None
    return_documents: bool | None


class ScoreArguments(AnyRequestArguments, total=False):
    """Arguments of `score` besides continuations and context."""

    return_tokens: bool | None


def spelled_out(arguments: type[Any]) -> Callable[[_Function], _Function]:
    """Decorator that lists the keyword arguments of a TypedDict in a function's signature, for `help` and notebooks.

    `help` and notebooks read signatures at run time and do not resolve `Unpack`. Each listed argument has the default
    `...`.
    """

    def show(function: _Function) -> _Function:
        own = signature(function)
        given = [each for each in own.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        named = [Parameter(name, Parameter.KEYWORD_ONLY, default=...) for name in arguments.__annotations__]
        shown = Signature([*given, *named], return_annotation=own.return_annotation)
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return show
