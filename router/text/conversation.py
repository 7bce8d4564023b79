"""Conversations as chat templates take them, and the terms on which their answers are read."""

from __future__ import annotations

from typing import Any

from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from router.model_registry import ServedModel
from router.text.reading import Reading
from router.validation import content_of


def template_messages(request: pb.ChatRequest) -> list[dict[str, Any]]:
    """The messages of a request, as transformers has them."""
    return [_template_message(message) for message in request.messages]


def _template_message(message: pb.ChatMessage) -> dict[str, Any]:
    made = {"role": message.role, "content": content_of(message)}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    return made


def reading_of(request: pb.ChatRequest, model: ServedModel, prompt: str) -> Reading | None:
    """The terms on which the answers to a conversation are read.

    Args:
        request: the conversation.
        model: its model.
        prompt: text that the chat template has made.

    Returns:
        None where they are content alone.

    Raises:
        InvalidFieldError: a channel is asked for that the model does not have.
    """
    form, options = model.text.response_form, request.reasoning
    separates = options.separate if options.HasField("separate") else model.reasons
    if separates and not model.reasons:
        problem = f"is true, and the chat template of {model.name!r} has no reasoning"
        raise InvalidFieldError("reasoning.separate", problem, "false, or a model with CAPABILITY_REASONING")
    if form is None or not separates:
        return None
    return Reading(form, form.template.opening(prompt), separates_reasoning=True)
