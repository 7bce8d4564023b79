"""The form of a model's answers: its response template, the tokens of its delimiters, and the style of grammars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, read_json
from router.answers.channels.calls import ToolSchemas
from router.answers.channels.grammar import CallStyle, one_call
from router.answers.channels.parser import Channel, ChannelPart, ResponseParser, merged
from router.answers.channels.probe import FoundForm, find_form, reads_calls, shows_tools
from router.answers.channels.template import (
    CONTENT_FIELD,
    REASONING_FIELDS,
    Delimiter,
    ResponseTemplate,
    ResponseTemplateError,
)

log = structlog.get_logger(__name__)

_WORD: Final = "hm"
_OWN_CALLS: Final = "has calls of no built-in form"
_OWN_TEXTS: Final = "has reasoning or content whose delimiters are neither single texts nor those of a built-in form"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """The form of a model's answers.

    Attributes:
        template: template that the router reads answers with.
        markers: texts of the tokens that stand for a delimiter, or for a part of one, by id.
        kept_ids: special tokens among the markers, which stay in the text that is read.
        style: style of calls and reasoning in grammars; None if no grammar can hold an answer.
        unheld: reason why no grammar can hold calls; empty if one can.
        is_own: True if the checkpoint brings the template.
        calls_tools: True if prompts show the tools of a request and the template separates calls from content.
        writes_calls: True if the calls of messages become content, because the chat template leaves them out.
    """

    template: ResponseTemplate
    markers: Mapping[int, str]
    kept_ids: frozenset[int]
    style: CallStyle | None = None
    unheld: str = ""
    is_own: bool = False
    calls_tools: bool = False
    writes_calls: bool = False

    def can_call(self, name: str, keys: Iterable[str]) -> bool:
        """True if the template reads a call as grammars write it, for a tool `name` with arguments `keys`."""
        if not self.is_own or self.style is None:
            return True
        parts = _read(self.template, one_call(self.style, name, keys), ToolSchemas({name: {}}))
        return [(part.channel, part.name) for part in parts] == [(Channel.CALL, name)]


def response_form(
    files: Mapping[str, bytes], tokenizer: Tokenizer, chat_template: ChatTemplate | None
) -> ResponseForm | None:
    """Returns the checkpoint's own response form, else the built-in form that fits its chat template.

    Args:
        files: files of the checkpoint's tokenizer.
        tokenizer: the tokenizer of these files.
        chat_template: the chat template of these files; None for a model without conversations.

    Returns:
        None if answers are content alone.
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
    # A special token in a message's content is text, so calls that begin with one cannot be content.
    writes_calls = found.is_described and tokenizer.special_tokens.isdisjoint(found.style.delimiters)
    return ResponseForm(
        template,
        markers,
        kept,
        found.style,
        found.unheld,
        calls_tools=template.has_calls,
        writes_calls=writes_calls,
    )


def _own_form(own: Any, tokenizer: Tokenizer, chat_template: ChatTemplate) -> ResponseForm | None:
    """Returns the form of a checkpoint's own response template; None if the template cannot be used."""
    try:
        template = ResponseTemplate(own)
    except ResponseTemplateError as error:
        log.warning("response template cannot be used; answers are content alone", error=str(error))
        return None
    markers, kept = _markers(template, tokenizer)
    try:
        style, unheld = _own_style(template, chat_template)
    except TimeoutError as error:
        style, unheld = None, str(error)
    if unheld:
        log.info("response template is not held by grammars", reason=unheld)
    calls_tools = template.has_calls and shows_tools(chat_template)
    return ResponseForm(template, markers, kept, style, unheld, is_own=True, calls_tools=calls_tools)


def _markers(template: ResponseTemplate, tokenizer: Tokenizer) -> tuple[Mapping[int, str], frozenset[int]]:
    """Texts of the added tokens that are delimiters of the template, by id, and the ids of the special ones."""
    markers = {id: token for id, token in tokenizer.added_tokens.items() if template.names(token)}
    return markers, frozenset(tokenizer.special_ids & markers.keys())


def _own_style(template: ResponseTemplate, chat_template: ChatTemplate) -> tuple[CallStyle | None, str]:
    """Returns the style of a checkpoint's own template, and the reason why it holds no calls; \"\" if it holds them.

    Calls have the style of the built-in form that fits the chat template, if the own template reads such calls too.
    """
    found = find_form(chat_template)
    reasoning, content = _reasoning_marks(template, found), _content_mark(template, found)
    if reasoning is None or content is None:
        return None, _OWN_TEXTS
    style = CallStyle((), "", reasoning=reasoning, content=content, delimiters=())
    if not template.has_calls:
        return style, ""
    if (
        found is None
        or not found.style.begins
        or found.unheld
        or not reads_calls(chat_template, template, found.family)
    ):
        return style, _OWN_CALLS
    return replace(found.style, reasoning=reasoning, content=content), ""


def _reasoning_marks(template: ResponseTemplate, found: FoundForm | None) -> tuple[str, str] | None:
    """Texts around reasoning that the template reads as such; empty without reasoning, None if none are known."""
    fields = [field for name, field in template.fields.items() if name in REASONING_FIELDS]
    if not fields:
        return "", ""
    known = [(begin, end) for field in fields for begin in _single(field.open) for end in _single(field.close)]
    known += [found.style.reasoning] if found is not None and found.style.reasoning[1] else []
    expected = [ChannelPart(Channel.REASONING, _WORD)]
    return next((marks for marks in known if _read(template, f"{marks[0]}{_WORD}{marks[1]}") == expected), None)


def _content_mark(template: ResponseTemplate, found: FoundForm | None) -> str | None:
    """Text in front of content that the template reads as such; empty without one, None if none is known."""
    content = template.fields.get(CONTENT_FIELD)
    if content is None or content.open is None:
        return ""
    known = [*_single(content.open), *([found.style.content] if found is not None and found.style.content else [])]
    return next(
        (mark for mark in known if _read(template, mark + _WORD) == [ChannelPart(Channel.CONTENT, _WORD)]), None
    )


def _single(delimiter: Delimiter | None) -> tuple[str, ...]:
    """The text of a delimiter that is always the same."""
    return delimiter.texts if delimiter is not None and len(delimiter.texts) == 1 else ()


def _read(template: ResponseTemplate, text: str, tools: ToolSchemas | None = None) -> list[ChannelPart]:
    parser = ResponseParser(template, tools=tools, separates_reasoning=True)
    return merged([*parser.push(text), *parser.finish()])
