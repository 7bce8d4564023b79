"""`/v1/models`, and vLLM's `/tokenize` and `/detokenize`: their bodies to calls, and the answers to JSON. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from fissile.client.base import detokenize, get_model, render_prompt, tokenize
from fissile.v1 import inference_pb2 as pb

from common.errors import InvalidFieldError
from facade.http.bodies import Body, TokenIdList, decode
from facade.http.runner import QuestionPlan
from facade.openai.chat import Message, ToolField, chat_message, chat_tool


def model_json(model: pb.Model, created: int) -> dict[str, Any]:
    """A model as OpenAI's and Anthropic's clients read it, with vLLM's fields and Fissile's own.

    Args:
        model: the model.
        created: Unix seconds of the start of this process: checkpoints do not say when they were made.
    """
    facts = {
        "capabilities": [pb.Capability.Name(each).removeprefix("CAPABILITY_").lower() for each in model.capabilities],
        "weights_digest": model.weights_digest,
        "tokenizer_sha256": model.tokenizer_sha256,
        "ready_workers": model.ready_workers,
    }
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "fissile",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "fissile": facts,
    }


def models_json(models: Sequence[pb.Model], created: int) -> dict[str, Any]:
    """The list of models: one page."""
    data = [model_json(model, created) for model in models]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, "has_more": False, **ends}


class TokenizeBody(Body):
    """A text or a conversation to tokenize; exactly one of them."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolField] | None = None
    add_special_tokens: Literal[True] | None = None
    add_generation_prompt: Literal[True] | None = None
    chat_template_kwargs: Any = None
    return_token_strs: bool | None = None


def parse_tokenize(body: bytes) -> QuestionPlan[Any]:
    """The calls for a body of `/tokenize`: the tokens, and the model for its length.

    Raises:
        ApiError: a field is invalid, or not served.
        ValueError: an argument does not fit.
    """
    given = decode(body, TokenizeBody)
    if (given.prompt is None) == (given.messages is None):
        raise InvalidFieldError("prompt", "is missing" if given.prompt is None else "is beside messages", "one of them")
    asked: Any
    if given.prompt is not None:
        if given.tools or given.chat_template_kwargs:
            raise InvalidFieldError("tools", "is set beside prompt", "messages, whose prompt has tools")
        asked = tokenize(given.prompt, given.model)
    else:
        asked = render_prompt([chat_message(i, each) for i, each in enumerate(given.messages or ())], _of_chat(given))
    if given.return_token_strs and given.prompt is None:
        raise InvalidFieldError("return_token_strs", "is set beside messages", "a prompt beside it")
    shown = functools.partial(tokens_json, has_texts=bool(given.return_token_strs))
    names = {"text": "prompt", "chat.messages": "messages*", "chat.tools": "tools*", "chat": "*"}
    return QuestionPlan(asked, shown, names, (get_model(given.model),))


def _of_chat(given: TokenizeBody) -> dict[str, Any]:
    fields = {
        "model": given.model,
        "tools": [chat_tool(each) for each in given.tools or ()],
        "template_arguments_json": given.chat_template_kwargs,
    }
    return {name: value for name, value in fields.items() if value is not None}


def tokens_json(
    answer: pb.TokenizeResponse | pb.RenderPromptResponse, model: pb.Model, *, has_texts: bool
) -> Mapping[str, Any]:
    """Token ids as vLLM's clients read them."""
    texts = [*answer.tokens] if has_texts and isinstance(answer, pb.TokenizeResponse) else None
    tokens = [*answer.token_ids]
    return {"count": len(tokens), "max_model_len": model.max_model_len, "tokens": tokens, "token_strs": texts}


class DetokenizeBody(Body):
    """Token ids to turn into text."""

    tokens: TokenIdList
    model: str = ""


def parse_detokenize(body: bytes) -> QuestionPlan[str]:
    """The call for a body of `/detokenize`. Special tokens stay in the text, as with vLLM.

    Raises:
        ApiError: a field is invalid, or not served.
        ValueError: an argument does not fit.
    """
    given = decode(body, DetokenizeBody)
    asked = detokenize(given.tokens, given.model, keep_special_tokens=True)
    return QuestionPlan(asked, lambda text: {"prompt": text}, {"token_ids": "tokens*"})
