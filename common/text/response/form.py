"""The form of a model's answers: its response template, and the tokens that stand for parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from common.text.chat_template import ChatTemplate
from common.text.response.families import family_name, family_of
from common.text.response.grammar import STYLES, CallStyle
from common.text.response.template import ResponseTemplate, ResponseTemplateError
from common.text.tokenizer import Tokenizer, read_json

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The form of a model's answers.

    Attributes:
        template: the form itself.
        markers: texts of the tokens that stand for a delimiter, or for a part of one, by id.
        kept_ids: special tokens among them, which stay in the text that is read.
        style: of calls and reasoning, as grammars write them; None where that is not known.
    """

    template: ResponseTemplate
    markers: Mapping[int, str]
    kept_ids: frozenset[int]
    style: CallStyle | None = None


def response_form(
    files: Mapping[str, bytes], tokenizer: Tokenizer, chat_template: ChatTemplate | None
) -> ResponseForm | None:
    """The form in a checkpoint's files: its own response template, else that of the family of its chat template.

    Args:
        files: of the checkpoint's tokenizer.
        tokenizer: made of them.
        chat_template: of them; None for none, and then there are no answers to a conversation.

    Returns:
        None where answers are content alone.
    """
    if chat_template is None:
        return None
    own: Any = read_json(files, "tokenizer_config.json").get("response_template")
    spec = own or family_of(chat_template.source)
    if spec is None:
        return None
    try:
        template = ResponseTemplate(spec)
    except ResponseTemplateError as error:
        log.warning("response template cannot be used; answers are content alone", error=str(error))
        return None
    markers = {id: token for id, token in tokenizer.added_tokens.items() if template.names(token)}
    style = None if own else STYLES.get(family_name(chat_template.source))
    return ResponseForm(template, markers, tokenizer.special_ids & markers.keys(), style)
