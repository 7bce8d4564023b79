"""Checks a request and makes it canonical; bad input gets the status that docs and README name for it.

Every refusal names the field by its path and says what would be valid. Fields that are not served are refused first
(`common.rpc.unsupported_fields`): nothing is accepted and ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any, Final

import numpy as np
from fissile.v1 import inference_pb2 as pb

from common.errors import (
    InvalidFieldError,
    PromptTooLongError,
    TextTooLongError,
)
from common.limits import (
    MAX_ANSWERS,
    MAX_CACHE_SALT_BYTES,
    MAX_CHAT_MESSAGES,
    MAX_CONTINUATIONS,
    MAX_DOCUMENTS,
    MAX_EMBED_INPUTS,
    MAX_EMBED_NUMBERS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PROMPT_TEXT_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_SESSION_ID_BYTES,
    MAX_STOP_TOKEN_SEQUENCE,
    MAX_TEMPLATE_ARGUMENT_BYTES,
)
from common.params.sampling_masks import check_bias_ids
from common.params.sampling_params import PARAMETERS, SamplingParams
from common.rpc.unsupported_fields import refuse_unserved
from common.wire.ids import check_id
from common.wire.sampling_protos import OUTPUT_FIELDS, PUBLIC_FIELDS, given_output, given_sampling
from router.answers.tools import check_tools, json_object

_FEW_IDS: Final = 128
_SHA256_BYTES: Final = 32
_NO_TEXT: Final = hashlib.sha256().digest()
# Characters of an unknown role that an error repeats.
_QUOTED_ROLE: Final = 64
_MOST_ENTRIES: Final = {name: row.most_entries for name, row in PARAMETERS.items() if row.most_entries is not None}
_COMMON = frozenset(
    (
        "model",
        "request_id",
        "priority",
        "session_id",
        "cache_salt",
        "output_options",
        "output_options.return_token_ids",
        "output_options.echo",
        "output_options.keep_special_tokens",
        "output_options.token_bytes",
        "output_options.prompt_token_ids",
        "output_options.receipt",
        "output_options.receipt.logits_every",
        *(f"output_options.{name}" for name in OUTPUT_FIELDS),
        "sampling_params",
        "resume",
        "resume.answers",
        "resume.answers.index",
        "resume.answers.token_ids",
        "resume.answers.token_ids.ids",
        "resume.answers.text",
        "resume.answers.text.bytes",
        "resume.answers.text.sha256",
        "resume.answers.text.tokens",
        "resume.answers.finished",
        "resume.weights_digest",
        "resume.numerics",
    )
) | {f"sampling_params.{path}" for path in {*PUBLIC_FIELDS, "best_of"}}
GENERATE_SERVED = _COMMON | {"text", "token_ids", "token_ids.ids"}
_TEXT_OR_TOKENS = ("text", "token_ids", "token_ids.ids")
SCORE_SERVED = frozenset(
    (
        "model",
        "request_id",
        "context",
        *(f"context.{path}" for path in _TEXT_OR_TOKENS),
        "continuations",
        *(f"continuations.{path}" for path in _TEXT_OR_TOKENS),
        "return_tokens",
        "priority",
        "session_id",
        "cache_salt",
    )
)
EMBED_SERVED = frozenset(
    (
        "model",
        "request_id",
        "inputs",
        *(f"inputs.{path}" for path in _TEXT_OR_TOKENS),
        "pooling",
        "normalize",
        "dimensions",
        "priority",
        "cache_salt",
        "session_id",
    )
)
RERANK_SERVED = frozenset(
    (
        "model",
        "request_id",
        "query",
        "documents",
        "top_n",
        "priority",
        "instruction",
        "return_documents",
        "session_id",
        "cache_salt",
    )
)
CHAT_SERVED = _COMMON | {
    "messages",
    "messages.role",
    "messages.content",
    "messages.parts",
    "messages.parts.text",
    "messages.reasoning",
    "messages.tool_calls",
    "messages.tool_calls.id",
    "messages.tool_calls.name",
    "messages.tool_calls.arguments_json",
    "messages.tool_call_id",
    "messages.name",
    "tools",
    "tools.name",
    "tools.description",
    "tools.parameters_json",
    "tools.strict",
    "tool_choice",
    "tool_choice.mode",
    "tool_choice.name",
    "parallel_tool_calls",
    "template_arguments_json",
    "reasoning",
    "reasoning.separate",
    "reasoning.max_tokens",
}


def check_request_id(request_id: str) -> None:
    """Refuses an id that is too long, or has control characters.

    Raises:
        InvalidFieldError: it is, or has.
    """
    check_id("request_id", request_id, MAX_REQUEST_ID_BYTES)


def check_generate(request: pb.GenerateRequest) -> None:
    """Checks what needs no model: served fields, the salt, and that there is a prompt of a sane size.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    _check_counts(request.sampling_params)
    refuse_unserved(request, GENERATE_SERVED)
    check_logprobs(request.output_options)
    _check_cache_salt(request.cache_salt)
    check_id("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    check_resume(request)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidFieldError("prompt", "is missing", "one of text, token_ids")
    if kind == "text":
        check_text("text", request.text)
    elif not request.token_ids.ids:
        raise InvalidFieldError("token_ids.ids", "is empty", "at least one token id")


def check_chat(request: pb.ChatRequest) -> None:
    """Checks what needs no model: served fields, the salt, and that there are messages of a sane size.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    _check_counts(request.sampling_params)
    if len(request.messages) > MAX_CHAT_MESSAGES:
        raise _message_count(len(request.messages))
    size = len(request.template_arguments_json.encode())
    if size > MAX_TEMPLATE_ARGUMENT_BYTES:
        valid = f"at most {MAX_TEMPLATE_ARGUMENT_BYTES}"
        raise InvalidFieldError("template_arguments_json", f"has {size} bytes", valid)
    refuse_unserved(request, CHAT_SERVED)
    check_logprobs(request.output_options)
    _check_cache_salt(request.cache_salt)
    check_id("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    check_resume(request)
    if request.output_options.echo:
        raise InvalidFieldError("output_options.echo", "is set", "no echo: only Generate continues its prompt")
    if not request.messages:
        raise _message_count(0)
    for i, message in enumerate(request.messages):
        if not message.role:
            raise InvalidFieldError(f"messages[{i}].role", "is empty", "a role of the model's chat template")
        _check_parts(f"messages[{i}]", message)
    _check_bytes("messages", sum(message.ByteSize() for message in request.messages), MAX_PROMPT_TEXT_BYTES)
    check_tools(request)
    _check_bytes("tools", sum(tool.ByteSize() for tool in request.tools), MAX_PROMPT_TEXT_BYTES)


def check_score(request: pb.ScoreRequest) -> None:
    """Checks what needs no model: served fields, the salt, and that there are continuations, all of one form.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    count = len(request.continuations)
    # Many are refused before they are looked at.
    if count <= MAX_CONTINUATIONS:
        refuse_unserved(request, SCORE_SERVED)
    if not 1 <= count <= MAX_CONTINUATIONS:
        raise InvalidFieldError("continuations", f"has {count} entries", f"1 to {MAX_CONTINUATIONS}")
    _check_cache_salt(request.cache_salt)
    check_id("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    form = request.continuations[0].WhichOneof("form")
    parts = [(f"continuations[{i}]", one) for i, one in enumerate(request.continuations)]
    if request.HasField("context"):
        parts.insert(0, ("context", request.context))
    for path, part in parts:
        kind = _check_text_or_tokens(path, part)
        if kind != form:
            raise InvalidFieldError(f"{path}.{kind}", f"stands beside {form}", "one form for all")
    _check_bytes("continuations", request.ByteSize(), MAX_PROMPT_TEXT_BYTES)


def check_embed(request: pb.EmbedRequest) -> None:
    """Checks what needs no model: served fields, the salt, and that there are inputs of a sane size.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    count = len(request.inputs)
    # Many are refused before they are looked at.
    if count <= MAX_EMBED_INPUTS:
        refuse_unserved(request, EMBED_SERVED)
    if not 1 <= count <= MAX_EMBED_INPUTS:
        raise InvalidFieldError("inputs", f"has {count} entries", f"1 to {MAX_EMBED_INPUTS}")
    _check_cache_salt(request.cache_salt)
    check_id("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    for i, one in enumerate(request.inputs):
        _check_text_or_tokens(f"inputs[{i}]", one)
    _check_bytes("inputs", request.ByteSize(), MAX_PROMPT_TEXT_BYTES)


def check_vectors(request: pb.EmbedRequest, size: int) -> None:
    """Checks the length and the number of the vectors, of a model whose hidden states have `size` numbers.

    Raises:
        InvalidFieldError: the length is out of range, or all vectors together fit in no message.
    """
    dimensions = request.dimensions if request.HasField("dimensions") else size
    if not 1 <= dimensions <= size:
        raise InvalidFieldError("dimensions", f"is {dimensions}", f"1 to {size}, the model's embedding_size")
    count = len(request.inputs)
    if count * dimensions > MAX_EMBED_NUMBERS:
        most = MAX_EMBED_NUMBERS // dimensions
        problem = f"has {count} entries, whose vectors of {dimensions} numbers fit in no message"
        raise InvalidFieldError("inputs", problem, f"at most {most} of them, or fewer dimensions")


def check_rerank(request: pb.RerankRequest) -> None:
    """Checks what needs no model: served fields, the salt, and that there are documents of a sane size.

    Raises:
        ApiError: a field is not served, or invalid.
    """
    refuse_unserved(request, RERANK_SERVED)
    count = len(request.documents)
    if not 1 <= count <= MAX_DOCUMENTS:
        raise InvalidFieldError("documents", f"has {count} entries", f"1 to {MAX_DOCUMENTS}")
    if request.top_n > count:
        raise InvalidFieldError("top_n", f"is {request.top_n}", f"0 to {count}, the number of documents")
    _check_cache_salt(request.cache_salt)
    check_id("session_id", request.session_id, MAX_SESSION_ID_BYTES)
    check_text("query", request.query)
    for i, document in enumerate(request.documents):
        check_text(f"documents[{i}]", document)
    # Each of the prompts contains the query.
    sizes = len(request.query.encode()) * count, len(request.instruction.encode()) * count
    _check_bytes("documents", request.ByteSize() + sum(sizes), MAX_PROMPT_TEXT_BYTES)


def _check_text_or_tokens(path: str, part: pb.TextOrTokens) -> str:
    """Refuses an empty one; its form."""
    kind = part.WhichOneof("form")
    if kind is None:
        raise InvalidFieldError(path, "is empty", "one of text, token_ids")
    if kind == "text":
        check_text(f"{path}.text", part.text)
    elif not part.token_ids.ids:
        raise InvalidFieldError(f"{path}.token_ids.ids", "is empty", "at least one token id")
    return kind


def check_resume(request: pb.GenerateRequest | pb.ChatRequest) -> None:
    """Checks what a client says it has got of a broken stream.

    Raises:
        InvalidFieldError: it cannot be so.
    """
    if not request.HasField("resume"):
        return
    if not request.request_id:
        raise InvalidFieldError("request_id", "is empty", "the id of the stream that broke")
    count = max(1, request.sampling_params.n)
    points = request.resume.answers
    seen = set[int]()
    for i, point in enumerate(points):
        path = f"resume.answers[{i}]"
        if point.index >= count or point.index in seen:
            raise InvalidFieldError(f"{path}.index", f"is {point.index}", f"each index below n, {count}, once")
        seen.add(point.index)
        if point.WhichOneof("received") == "text":
            _check_digest(f"{path}.text", point.text)
            _check_delivered_tokens(f"{path}.text.tokens", point.text, request)
        most = request.sampling_params.max_tokens
        # Ids of an echoed prompt do not count, but their number is not known yet.
        is_clear = request.sampling_params.HasField("max_tokens") and not request.output_options.echo
        if is_clear and len(point.token_ids.ids) > most:
            raise InvalidFieldError(
                f"{path}.token_ids.ids", f"has {len(point.token_ids.ids)} entries", f"at most {most}"
            )
    if sum(point.finished for point in points) == count:
        raise InvalidFieldError("resume.answers", "are all finished", "an answer that is not")


def _check_digest(path: str, digest: pb.TextDigest) -> None:
    """Checks a text's length and digest. The first tokens of an answer may have no text: the head of a tool call."""
    # Without text only the digest of no bytes is valid.
    has_text = digest.bytes > 0 or (digest.tokens > 0 and digest.sha256 == _NO_TEXT)
    if not has_text or len(digest.sha256) != _SHA256_BYTES:
        valid = f"at least 1 byte of text, or tokens that have none, and {_SHA256_BYTES} bytes of sha256"
        raise InvalidFieldError(path, "is not a digest", valid)


def _check_delivered_tokens(path: str, digest: pb.TextDigest, request: pb.GenerateRequest | pb.ChatRequest) -> None:
    """Checks the number of tokens of a delivered text, which clients must send that have the ids or logprobs."""
    options, most = request.output_options, request.sampling_params.max_tokens
    beside = "return_token_ids" if options.return_token_ids else "logprobs" if options.HasField("logprobs") else ""
    if beside and not digest.tokens:
        valid = "the number of tokens that have come, or resume by token_ids"
        raise InvalidFieldError(path, f"is 0 beside {beside}", valid)
    if digest.tokens and not beside:
        raise InvalidFieldError(path, f"is {digest.tokens}", "0: neither token ids nor logprobs have come")
    if request.sampling_params.HasField("max_tokens") and digest.tokens > most:
        raise InvalidFieldError(path, f"is {digest.tokens}", f"at most {most}")


def check_whole_answers(request: pb.GenerateRequest | pb.ChatRequest, *, is_streamed: bool) -> None:
    """Refuses what makes sense for streams alone, or for whole answers alone.

    Raises:
        InvalidFieldError: it is asked of the other.
    """
    if request.HasField("resume") and not is_streamed:
        raise InvalidFieldError("resume", "is set", "no resume: of a call that broke nothing has come")
    if request.sampling_params.HasField("best_of") and is_streamed:
        valid = "no best_of: GenerateOnce and ChatOnce choose among whole answers"
        raise InvalidFieldError("sampling_params.best_of", "is set", valid)


def with_candidates(params: SamplingParams, message: pb.SamplingParams) -> SamplingParams:
    """The parameters of all answers among which the best are chosen: that is told by their logprobs."""
    if not message.HasField("best_of"):
        return params
    return replace(params, n=message.best_of, logprobs=params.logprobs or 0)


def check_roles(messages: Iterable[pb.ChatMessage], known: Set[str]) -> None:
    """Refuses roles that neither are usual nor in the model's template: it would print a misspelt one, or a token.

    Raises:
        InvalidFieldError: names the first message with such a role.
    """
    for i, message in enumerate(messages):
        if message.role not in known:
            valid = "system, user, assistant, tool, or another that the model's chat template names"
            raise InvalidFieldError(f"messages[{i}].role", f"is {message.role[:_QUOTED_ROLE]!r}", valid)


def check_priority(priority: int) -> None:
    """Refuses a priority that there is not.

    Raises:
        InvalidFieldError: a value that this version does not know.
    """
    if priority not in pb.Priority.values():
        names = ", ".join(name for name, value in pb.Priority.items() if value)
        raise InvalidFieldError("priority", f"is {priority}", f"one of {names}")


def check_text(path: str, text: str) -> None:
    """Refuses empty text, and text that is too long to be tokenized at all.

    Raises:
        InvalidFieldError: it is empty.
        TextTooLongError: it is too long.
    """
    if not text:
        raise InvalidFieldError(path, "is empty", "at least one character")
    check_text_bytes(path, text)


def check_text_bytes(path: str, text: str, most: int = MAX_PROMPT_TEXT_BYTES) -> None:
    """Refuses text that is too long to be tokenized at all.

    Raises:
        TextTooLongError: it has more than `most` bytes.
    """
    _check_bytes(path, len(text.encode()), most)


def content_of(message: pb.ChatMessage) -> str:
    """The text of a message that `check_chat` let pass."""
    return message.content or "".join(part.text for part in message.parts)


# Parameters of `apply_chat_template` that no template reads. Clients of other servers send them as template variables.
_RENDERING_PARAMETERS: Final = (
    *("conversation", "chat_template", "continue_final_message", "tokenize", "sanitize_control_tokens", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "processor_kwargs"),
)


def template_arguments(request: pb.ChatRequest) -> dict[str, Any]:
    """The request's further template variables as Python values, in their order.

    Raises:
        InvalidFieldError: no JSON object, a name that stands twice in one, or a reserved name.
    """
    path = "template_arguments_json"
    if not request.template_arguments_json:
        return {}
    arguments = json_object(path, request.template_arguments_json)
    for name in ("messages", "tools", "self"):
        if name in arguments:
            raise InvalidFieldError(f"{path}.{name}", "is a reserved name", "another name")
    for name in _RENDERING_PARAMETERS:
        if name in arguments:
            problem = "is a parameter of transformers' apply_chat_template, not a variable of a template"
            raise InvalidFieldError(f"{path}.{name}", problem, "variables that the model's chat template reads")
    return arguments


def check_token_ids(path: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses ids outside the vocabulary.

    Raises:
        InvalidFieldError: names the first bad one.
    """
    if len(token_ids) <= _FEW_IDS and max(token_ids, default=0) < vocab_size:
        return
    # One conversion in C: a million ids take 0.4 ms, a loop would stall the service; for a few it takes longer.
    ids = np.array(token_ids, dtype=np.int64)
    bad = np.flatnonzero(ids >= vocab_size)
    if bad.size:
        i = int(bad[0])
        raise InvalidFieldError(f"{path}[{i}]", f"is {token_ids[i]}", f"an id from 0 to {vocab_size - 1}")


def check_resumed_ids(token_ids: Sequence[int], vocab_size: int, room: int) -> None:
    """Refuses tokens that cannot have come of an answer.

    Args:
        token_ids: what has come, as the client says.
        vocab_size: of the model.
        room: most tokens of the answer.

    Raises:
        InvalidFieldError: one is outside the vocabulary, or they are too many.
    """
    path = "resume.answers.token_ids.ids"
    if len(token_ids) > room:
        valid = f"at most {room}, as max_tokens and the model's length leave"
        raise InvalidFieldError(path, f"has {len(token_ids)} entries", valid)
    check_token_ids(path, token_ids, vocab_size)


def check_prompt_length(path: str, prompt_tokens: int, max_model_len: int) -> None:
    """Refuses a prompt that is empty or leaves no room for an answer.

    Raises:
        InvalidFieldError: it has no tokens.
        PromptTooLongError: it is too long.
    """
    if prompt_tokens == 0:
        raise InvalidFieldError(path, "gives no tokens", "a prompt of at least one token")
    if prompt_tokens >= max_model_len:
        raise PromptTooLongError(path, prompt_tokens, max_model_len)


def sampling_params(message: pb.SamplingParams, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
    """The canonical parameters with every default, those of the model first, filled in.

    Raises:
        ApiError: a value is out of range or not served; names the field and what would be valid.
    """
    _check_n(message)
    _check_best_of(message)
    _check_counts(message)
    _check_stop_token_sequences(message.stop_token_sequences, vocab_size)
    params = replace(defaults, **given_sampling(message))
    if message.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        problem = f"is {params.min_tokens}"
        raise InvalidFieldError("sampling_params.min_tokens", problem, f"at most max_tokens, {params.max_tokens}")
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(f"sampling_params.{name}", getattr(params, name), vocab_size)
    check_bias_ids(params, vocab_size)
    return params


def with_logprobs(params: SamplingParams, options: pb.OutputOptions, vocab_size: int) -> SamplingParams:
    """`params` with the logprobs that are wanted of generated tokens and of the prompt.

    Raises:
        InvalidFieldError: an option is out of range; names it.
    """
    if not _asks_for_logprobs(options):
        return params
    try:
        made = replace(params, **given_output(options))
    except InvalidFieldError as error:
        (violation,) = error.violations
        path = violation.path.replace("sampling_params", "output_options", 1)
        raise InvalidFieldError(path, violation.problem, violation.valid) from None
    check_token_ids("output_options.logprob_token_ids", made.logprob_token_ids, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(made, name) or 0) > vocab_size:
            problem = f"is {getattr(made, name)}"
            raise InvalidFieldError(f"output_options.{name}", problem, f"at most {vocab_size}, the model's tokens")
    return made


def check_prompt_logprobs(params: SamplingParams, prompt_tokens: int) -> None:
    """Refuses prompt logprobs that begin behind the prompt.

    Raises:
        InvalidFieldError: they do.
    """
    if params.prompt_logprobs is not None and params.prompt_logprobs_start > prompt_tokens:
        problem = f"is {params.prompt_logprobs_start}"
        valid = f"at most {prompt_tokens}, the prompt's tokens"
        raise InvalidFieldError("output_options.prompt_logprobs_start", problem, valid)


def check_logprobs(options: pb.OutputOptions) -> None:
    """Refuses options of logprobs where there are none.

    Raises:
        InvalidFieldError: names the option.
    """
    if len(options.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        problem = f"has {len(options.logprob_token_ids)} entries"
        raise InvalidFieldError("output_options.logprob_token_ids", problem, f"at most {MAX_LOGPROB_TOKEN_IDS}")
    if options.logprobs_kind and not options.HasField("logprobs"):
        raise InvalidFieldError("output_options.logprobs_kind", "stands without logprobs", "logprobs")
    if options.HasField("prompt_logprobs_start") and not options.HasField("prompt_logprobs"):
        path = "output_options.prompt_logprobs_start"
        raise InvalidFieldError(path, "stands without prompt_logprobs", "prompt_logprobs")


def _asks_for_logprobs(options: pb.OutputOptions) -> bool:
    return options.HasField("logprobs") or options.HasField("prompt_logprobs") or bool(options.logprob_token_ids)


def clip_to_length(params: SamplingParams, prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """`params` with no more tokens than the model's length leaves."""
    room = max_model_len - prompt_tokens
    if params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _check_cache_salt(cache_salt: str) -> None:
    size = len(cache_salt.encode())
    if size > MAX_CACHE_SALT_BYTES:
        raise InvalidFieldError("cache_salt", f"has {size} bytes", f"at most {MAX_CACHE_SALT_BYTES} bytes of UTF-8")


def _check_n(message: pb.SamplingParams) -> None:
    if message.HasField("n") and not 1 <= message.n <= MAX_ANSWERS:
        raise InvalidFieldError("sampling_params.n", f"is {message.n}", f"1 to {MAX_ANSWERS}")


def _check_best_of(message: pb.SamplingParams) -> None:
    least = max(1, message.n)
    if message.HasField("best_of") and not least <= message.best_of <= MAX_ANSWERS:
        raise InvalidFieldError("sampling_params.best_of", f"is {message.best_of}", f"n, {least}, to {MAX_ANSWERS}")


def _check_counts(message: pb.SamplingParams) -> None:
    """Refuses lists that are too long before anything looks at their entries: a message has room for millions."""
    for name, most in _MOST_ENTRIES.items():
        count = len(getattr(message, name))
        if count > most:
            raise InvalidFieldError(f"sampling_params.{name}", f"has {count} entries", f"at most {most}")


def _check_stop_token_sequences(sequences: Iterable[pb.TokenIds], vocab_size: int) -> None:
    for i, sequence in enumerate(sequences):
        path = f"sampling_params.stop_token_sequences[{i}].ids"
        if not 1 <= len(sequence.ids) <= MAX_STOP_TOKEN_SEQUENCE:
            valid = f"1 to {MAX_STOP_TOKEN_SEQUENCE} token ids"
            raise InvalidFieldError(path, f"has {len(sequence.ids)} entries", valid)
        check_token_ids(path, sequence.ids, vocab_size)


def _message_count(count: int) -> InvalidFieldError:
    return InvalidFieldError("messages", f"has {count} entries", f"1 to {MAX_CHAT_MESSAGES} messages")


def _check_bytes(path: str, size: int, most: int) -> None:
    if size > most:
        raise TextTooLongError(path, f"has {size} bytes", f"at most {most} bytes of UTF-8")


def _check_parts(path: str, message: pb.ChatMessage) -> None:
    if message.content and message.parts:
        raise InvalidFieldError(f"{path}.parts", "stands beside content", "one of content, parts")
    for j, part in enumerate(message.parts):
        if part.WhichOneof("content") is None:
            raise InvalidFieldError(f"{path}.parts[{j}]", "is empty", "text")
