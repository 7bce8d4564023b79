"""Chooses the grammar that holds an answer to the tools, the reasoning budget and the constraint of its request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from fissile.receipts import confining
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from router.answers.channel_reader import Confinement
from router.answers.channels import arguments
from router.answers.channels.arguments import Argument
from router.answers.channels.form import ResponseForm
from router.answers.channels.grammar import AnswerGrammar, CalledTool, ReasoningLimit
from router.answers.channels.parser import ResponseParser
from router.answers.tools import ends_with_first_call
from router.model_registry import ServedModel

_NO_ARGUMENTS: Final = '{"type": "object", "additionalProperties": false}'
_AT_WILL: Final = "no strict and no constraint, or another tool_choice"


def confinement_of(
    request: pb.ChatRequest,
    model: ServedModel,
    form: ResponseForm,
    opening: str,
    tools: list[dict[str, Any]] | None,
    *,
    separates_reasoning: bool,
) -> Confinement | None:
    """Returns the grammar that an answer is held to.

    Args:
        request: the conversation.
        model: its model.
        form: form of the model's answers.
        opening: text of the answer that the prompt ends with.
        tools: the tools as given to the chat template; None for none.
        separates_reasoning: True if reasoning is a channel of its own.

    Returns:
        None if the form of the model's answers is unknown and the request needs no grammar.

    Raises:
        InvalidFieldError: a field needs a grammar that cannot be made for this model.
    """
    field = _field_of(request)
    if form.style is None:
        if field:
            problem = f"needs a form of answers that grammars hold, which {model.name!r} does not have{_because(form)}"
            raise InvalidFieldError(field, problem, "leave it out")
        return None
    writer = AnswerGrammar(form.style, form.markers, model.eos_token_ids)
    thinking = _thinking(request, form, opening) if separates_reasoning or tools else None
    if not field:
        return Confinement("", "", (), writer, thinking if separates_reasoning else None)
    if tools is not None and form.unheld:
        problem = f"needs calls that grammars hold, as those of {model.name!r} are not{_because(form)}"
        raise InvalidFieldError(field, problem, "leave it out")
    _check(request, model, writer, field, thinking, has_tools=tools is not None)
    called, schemas = _called(request, tools or [], writer)
    _check_names(form, request, called)
    is_named, must_call = request.tool_choice.WhichOneof("choice") == "name", _is_required(request)
    has_constraint = request.sampling_params.HasField("constraint")
    is_beside = has_constraint and bool(called) and not must_call
    grammar = writer.calls(
        called,
        None if is_beside else thinking,
        is_required=must_call or is_beside,
        is_one=is_named or ends_with_first_call(request),
    )
    if has_constraint and not called:
        grammar = ""
    return Confinement(grammar, field, schemas, writer, thinking, is_beside)


def _because(form: ResponseForm) -> str:
    of = "response_template " if form.is_own else ""
    return f": its {of}{form.unheld}" if form.unheld else ""


def _check_names(form: ResponseForm, request: pb.ChatRequest, called: Sequence[CalledTool]) -> None:
    """Refuses tools whose calls the model's response template would not read."""
    places = {tool.name: i for i, tool in enumerate(request.tools)}
    for tool in called:
        if not form.can_call(tool.name, [argument.name for argument in tool.arguments]):
            problem = "is, with the names of its arguments, not read where the model's calls have it"
            raise InvalidFieldError(
                f"tools[{places[tool.name]}].name", problem, "other names of the tool or of its arguments"
            )


def _is_required(request: pb.ChatRequest) -> bool:
    choice = request.tool_choice
    return choice.WhichOneof("choice") == "name" or choice.mode == pb.TOOL_MODE_REQUIRED


def _field_of(request: pb.ChatRequest) -> str:
    """Path of the request field that requires a grammar; "" for none."""
    if confining(request) is None:
        return ""
    if _is_required(request):
        return "tool_choice"
    strict = next((i for i, tool in enumerate(request.tools) if tool.strict), None)
    if strict is not None:
        return f"tools[{strict}].strict"
    return "reasoning.max_tokens" if request.reasoning.HasField("max_tokens") else "sampling_params.constraint"


def _check(
    request: pb.ChatRequest,
    model: ServedModel,
    writer: AnswerGrammar,
    field: str,
    thinking: ReasoningLimit | None,
    *,
    has_tools: bool,
) -> None:
    """Refuses fields that the model's delimiters do not allow to guarantee."""
    if has_tools and not writer.holds:
        problem = f"needs delimiters of calls that are tokens, which {model.name!r} does not have"
        raise InvalidFieldError(field, problem, "leave it out")
    if has_tools and not _is_required(request) and not writer.tells_calls:
        problem = f"needs calls that begin with a token of their own, as those of {model.name!r} do not"
        raise InvalidFieldError(field, problem, _AT_WILL)
    if request.reasoning.HasField("max_tokens") and (thinking is None or not writer.ends_reasoning):
        problem = f"needs reasoning in its own channel that ends with a token, which {model.name!r} does not have here"
        raise InvalidFieldError("reasoning.max_tokens", problem, "leave it out")


def _thinking(request: pb.ChatRequest, form: ResponseForm, opening: str) -> ReasoningLimit | None:
    """Limits of the reasoning in an answer; None if the model writes none, or the prompt has ended it."""
    if not form.template.has_reasoning:
        return None
    most = request.reasoning.max_tokens if request.reasoning.HasField("max_tokens") else None
    reader = ResponseParser(form.template, tools=None, separates_reasoning=True, opening=opening)
    if reader.is_reasoning:
        return ReasoningLimit(has_begun=True, max_tokens=most)
    return None if opening.strip() else ReasoningLimit(max_tokens=most)


def _called(
    request: pb.ChatRequest, tools: list[dict[str, Any]], writer: AnswerGrammar
) -> tuple[list[CalledTool], list[tuple[str, str]]]:
    """Returns the tools that may be called, and path and text of each strict schema."""
    name = request.tool_choice.name
    called, schemas = list[CalledTool](), list[tuple[str, str]]()
    for i, (given, tool) in enumerate(zip(request.tools, tools, strict=False)):
        if name and given.name != name:
            continue
        schema = (given.parameters_json or _NO_ARGUMENTS) if given.strict else ""
        parameters = tool["function"]["parameters"]
        if given.strict:
            path = f"tools[{i}].parameters_json"
            if parameters.get("type") != "object":
                raise InvalidFieldError(path, "has no type object", '"type": "object" at its root')
            schemas.append((path, schema))
        called.append(
            CalledTool(given.name, schema, () if writer.has_json else _arguments(i, given, parameters, writer))
        )
    return called, schemas


def _arguments(i: int, given: pb.Tool, parameters: dict[str, Any], writer: AnswerGrammar) -> list[Argument]:
    if not given.strict:
        return arguments.declared(parameters)
    try:
        return arguments.strict(parameters, writer.tag_end)
    except arguments.ArgumentError as error:
        valid = "a schema of which each property says whether it is a string"
        raise InvalidFieldError(f"tools[{i}].parameters_json", f"cannot be held: {error}", valid) from None
