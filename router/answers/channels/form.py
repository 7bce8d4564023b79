"""The form of a model's answers: its response template, and the tokens that stand for parts of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, read_json
from router.answers.channels.grammar import CallStyle
from router.answers.channels.own_styles import StyleError, own_calls, own_style, reads
from router.answers.channels.probe import find_form, shows_tools
from router.answers.channels.template import ResponseTemplate, ResponseTemplateError

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The form of a model's answers.

    Attributes:
        template: the form itself.
        markers: texts of the tokens that stand for a delimiter, or for a part of one, by id.
        kept_ids: special tokens among them, which stay in the text that is read.
        style: of calls and reasoning, as grammars write them; None where grammars cannot hold them.
        unheld: why grammars cannot hold calls; empty where they can.
        is_own: True if it is the checkpoint's own.
        calls_tools: True if prompts contain the tools of a request, and calls can be separated from content.
    """

    template: ResponseTemplate
    markers: Mapping[int, str]
    kept_ids: frozenset[int]
    style: CallStyle | None = None
    unheld: str = ""
    is_own: bool = False
    calls_tools: bool = False

    def can_call(self, name: str, keys: Iterable[str]) -> bool:
        """True if a call of a tool of this name, with these arguments, is read as grammars write it."""
        return not self.is_own or self.style is None or reads(self.template, self.style, name, keys)


def response_form(
    files: Mapping[str, bytes], tokenizer: Tokenizer, chat_template: ChatTemplate | None
) -> ResponseForm | None:
    """The response form of a checkpoint: its own response template, else the family's that fits its chat template.

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
    if own:
        return _own_form(own, tokenizer, chat_template)
    found = find_form(chat_template)
    if found is None:
        return None
    template = ResponseTemplate(found.spec)
    markers, kept = _markers(template, tokenizer)
    return ResponseForm(template, markers, kept, found.style, found.unheld, calls_tools=template.has_calls)


def _own_form(own: Any, tokenizer: Tokenizer, chat_template: ChatTemplate) -> ResponseForm | None:
    """The response form from a checkpoint's own response template; None if the template cannot be used."""
    try:
        template = ResponseTemplate(own)
    except ResponseTemplateError as error:
        log.warning("response template cannot be used; answers are content alone", error=str(error))
        return None
    markers, kept = _markers(template, tokenizer)
    style, unheld = _own(template, markers.values())
    if unheld:
        log.info("response template is not held by grammars", reason=unheld)
    calls_tools = template.has_calls and shows_tools(chat_template)
    return ResponseForm(template, markers, kept, style, unheld, is_own=True, calls_tools=calls_tools)


def _markers(template: ResponseTemplate, tokenizer: Tokenizer) -> tuple[Mapping[int, str], frozenset[int]]:
    """Texts of the added tokens that are delimiters of the template, by id, and the ids of the special ones."""
    markers = {id: token for id, token in tokenizer.added_tokens.items() if template.names(token)}
    return markers, frozenset(tokenizer.special_ids & markers.keys())


def _own(template: ResponseTemplate, markers: Collection[str]) -> tuple[CallStyle | None, str]:
    """The style of a checkpoint's own template, and why it has no calls."""
    style = None
    try:
        style = own_style(template, markers)
        return own_calls(template, markers, style) if template.has_calls else style, ""
    except (StyleError, TimeoutError) as error:
        return style, str(error)
