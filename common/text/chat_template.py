"""Chat templates: Jinja from the model's files, rendered as transformers renders them.

Templates come from strangers and their input from clients, so the sandbox is transformers' own (immutable, no private
attributes) with two bounds added: the size of the result and the time, checked at every call and every piece of output.
Special tokens in the input are marked, so that `Tokenizer.encode` takes them for text (see `common.text.tokenizer`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from common.errors import InvalidFieldError
from common.limits import MAX_PROMPT_TEXT_BYTES, MAX_TEMPLATE_S
from common.text.tokenizer import (
    MARK_END,
    MARK_START,
    TokenizerError,
    mark_special,
    named_special_tokens,
    read_json,
    special_pattern,
    special_tokens,
)

# Names under which a message's reasoning arrives; templates read the first.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_LONGEST_MESSAGE: Final = 300


class TemplateInputError(InvalidFieldError):
    """INVALID_ARGUMENT: the model's chat template rejects the messages, tools or template arguments."""

    def __init__(self, message: str) -> None:
        super().__init__("messages", f"do not fit the model's chat template: {message}", "what the template accepts")


class ChatTemplate:
    """The chat templates of one model: usually one, sometimes a second for requests with tools.

    Immutable, and `render` may run in several threads.

    Raises:
        TokenizerError: a template has a syntax error.
    """

    def __init__(self, templates: Mapping[str, str], files: Mapping[str, bytes]) -> None:
        self._templates = {name: _compile(name, source) for name, source in templates.items()}
        self._variables = named_special_tokens(files)
        self._special = special_pattern(special_tokens(files))

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """The template of `chat_template.jinja`, else of `tokenizer_config.json`; None when the model has none.

        Raises:
            TokenizerError: a file can not be read, or a template has a syntax error.
        """
        templates = _sources(files)
        return cls(templates, files) if templates else None

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **arguments: Any
    ) -> str:
        """The prompt for `messages`, for `Tokenizer.encode(..., allow_special=True)`.

        `arguments` are further variables of the template; `add_generation_prompt` is true unless given. The text equals
        `apply_chat_template(..., tokenize=False)` of transformers while the input has no special token in it; such a
        token is wrapped in two noncharacters.

        Raises:
            TemplateInputError: the template rejects the input, or the result is too long or takes too long.
        """
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        chat = [_alias_reasoning(message) for message in plain]
        variables = {**self._variables, "add_generation_prompt": True, "documents": None, **self._mark(arguments)}
        variables |= {"messages": self._mark(chat), "tools": self._mark(tools)}
        return _render(self._select(tools), variables)

    def _select(self, tools: list[dict[str, Any]] | None) -> jinja2.Template:
        if tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise TemplateInputError(f"the model has templates {sorted(self._templates)} but no default")
        return self._templates["default"]

    def _mark(self, value: Any) -> Any:
        """`value` with the special tokens in its strings marked. Keys too: templates print those of tool schemas."""
        if isinstance(value, str):
            if MARK_START in value or MARK_END in value:
                raise TemplateInputError("a string has one of the noncharacters U+FDD0 and U+FDD1")
            return mark_special(value, self._special)
        if isinstance(value, Mapping):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        return value


def _sources(files: Mapping[str, bytes]) -> dict[str, str]:
    """Templates by name: a file of its own wins over the configuration's string or list of named templates."""
    if "chat_template.jinja" in files:
        return {"default": files["chat_template.jinja"].decode("utf-8", "replace")}
    configured = read_json(files, "tokenizer_config.json").get("chat_template")
    if isinstance(configured, list):
        return {str(entry["name"]): str(entry["template"]) for entry in configured}
    return {} if configured is None else {"default": str(configured)}


def _alias_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    deadline = time.monotonic() + MAX_TEMPLATE_S
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate({**variables, _DEADLINE: deadline}):
            _check_deadline(deadline)
            size += len(piece)
            if size > MAX_PROMPT_TEXT_BYTES:
                raise TemplateInputError(f"the prompt has more than {MAX_PROMPT_TEXT_BYTES} characters")
            pieces.append(piece)
    except TemplateInputError:
        raise
    except RecursionError:
        raise TemplateInputError("the input is nested too deeply") from None
    # A template may fail in any way on input that its author did not think of: adding a list to a string, for example.
    except Exception as error:
        raise TemplateInputError(_said(error)) from None
    return "".join(pieces)


def _said(error: Exception) -> str:
    """One line, short enough for a status: templates put the input's words into their messages."""
    line = " ".join(str(error).replace(MARK_START, "").replace(MARK_END, "").split())
    return line[:_LONGEST_MESSAGE] or type(error).__name__


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TemplateInputError(f"the template took longer than {MAX_TEMPLATE_S:g} s")


# No identifier, so no template can name it.
_DEADLINE: Final = "fissile deadline"


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' sandbox with a deadline: every loop over something large calls `range` or prints."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls an object for the template, in time only."""
        _check_deadline(__context.get(_DEADLINE))
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """The `{% generation %}` tag, which marks the assistant's words for training; here they are just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """The tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace, which must not store private names."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set the private attribute {name!r}")


class _Dict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as in transformers: the template prints a date for the model to know.
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Escaped marks would no longer mark anything.
    return text.replace("\\ufdd0", MARK_START).replace("\\ufdd1", MARK_END) if ensure_ascii else text


def _compile(name: str, source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"chat template {name!r}, line {error.lineno}: {error.message}") from None
