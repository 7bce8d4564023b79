"""Converts conversations for chat templates, and chooses how their answers are read."""

from __future__ import annotations

from typing import Any

from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from router.answers.channel_reader import ChannelTerms
from router.answers.channels.form import ResponseForm
from router.answers.channels.grammar import CallStyle, written_calls
from router.answers.tools import declared, ends_with_first_call, template_calls
from router.model_registry import ServedModel
from router.prompts.confinement import confinement_of
from router.validation import content_of

# Names of message fields in chat templates.
_TEXTS = {"reasoning": "reasoning_content", "tool_call_id": "tool_call_id", "name": "name"}


def template_messages(request: pb.ChatRequest, form: ResponseForm | None = None) -> list[dict[str, Any]]:
    """Converts the messages of a request to transformers' form.

    Args:
        request: the conversation.
        form: the form of the model's answers, which may write calls as content.

    Raises:
        InvalidFieldError: arguments of a call are not a JSON object.
    """
    messages = [_template_message(f"messages[{i}]", message) for i, message in enumerate(request.messages)]
    if form is None or form.style is None or not form.writes_calls:
        return messages
    return [_with_written_calls(message, form.style) for message in messages]


def _with_written_calls(message: dict[str, Any], style: CallStyle) -> dict[str, Any]:
    """Converts the calls of a message to text behind its content, as the model writes them."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    texts = [text for text in (message["content"], written_calls(style, calls)) if text]
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}


def _template_message(path: str, message: pb.ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": content_of(message)}
    made |= {key: getattr(message, name) for name, key in _TEXTS.items() if getattr(message, name)}
    if message.tool_calls:
        made["tool_calls"] = template_calls(path, message)
    return made


def reading_of(
    request: pb.ChatRequest, model: ServedModel, prompt: str, tools: list[dict[str, Any]] | None
) -> ChannelTerms | None:
    """Chooses how the answers to a conversation are read in channels.

    Args:
        request: the conversation.
        model: its model.
        prompt: the rendered prompt.
        tools: the tools as given to the chat template; None for none.

    Returns:
        None if answers are content alone.

    Raises:
        InvalidFieldError: the request asks for a channel that the model does not have.
    """
    form, options = model.text.response_form, request.reasoning
    separates = options.separate if options.HasField("separate") else model.reasons
    if separates and not model.reasons:
        problem = f"is true, and no reasoning is known of {model.name!r}"
        raise InvalidFieldError("reasoning.separate", problem, "false, or a model with CAPABILITY_REASONING")
    if tools is not None and not model.calls_tools:
        problem = f"are given, and no calls of tools are known of {model.name!r}"
        raise InvalidFieldError("tools", problem, "no tools, or a model with CAPABILITY_TOOLS")
    if form is None or not (separates or tools):
        if options.HasField("max_tokens"):
            problem = "stands without reasoning in its own channel"
            raise InvalidFieldError("reasoning.max_tokens", problem, "reasoning.separate, of a model that reasons")
        return None
    opening = form.template.opening(prompt)
    return ChannelTerms(
        form,
        opening,
        separates_reasoning=separates,
        tools=None if tools is None else declared(tools),
        ends_with_first_call=ends_with_first_call(request),
        is_constrained=request.sampling_params.HasField("constraint"),
        confinement=confinement_of(request, model, form, opening, tools, separates_reasoning=separates),
    )
