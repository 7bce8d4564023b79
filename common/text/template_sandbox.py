"""Renders chat templates in transformers' sandbox, with bounds on time and size.

Templates come from strangers, and their input comes from clients. As in transformers, the sandbox is immutable and
hides private attributes. It also bounds the time, the size of the result, and the size of each value that operators,
methods and filters make. It checks the time in every turn of a loop, at every call and at every piece of output.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, MappingView
from datetime import datetime
from itertools import chain
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Compare, Concat, Const, ExprStmt, Filter, For, List, Node, Template
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from common.errors import InvalidFieldError
from common.limits import MAX_PROMPT_TEXT_BYTES, MAX_TEMPLATE_S, MAX_TEMPLATE_WORK
from common.text.tokenizer import MARK_END, MARK_START, TokenizerError, unmarked

_LONGEST_MESSAGE: Final = 300


class TemplateInputError(InvalidFieldError):
    """INVALID_ARGUMENT: the model's chat template rejects the messages, tools or template arguments."""

    def __init__(self, message: str, path: str = "messages") -> None:
        super().__init__(path, f"do not fit the model's chat template: {message}", "what the template accepts")


class TemplateDepthError(TemplateInputError):
    """INVALID_ARGUMENT: the input is nested more deeply than the template can process."""

    def __init__(self, path: str = "messages") -> None:
        super().__init__("the input is nested too deeply", path)


def render_template(template: jinja2.Template, variables: dict[str, Any], bounds: TemplateBounds | None = None) -> str:
    """Renders a template that `compile_template` compiled.

    Args:
        template: the compiled template.
        variables: variables of the template, by name.
        bounds: budget that several renderings share; None for a separate budget.

    Raises:
        TemplateInputError: the template rejects the input, or the result is too long or takes too long.
    """
    bounds = TemplateBounds() if bounds is None else bounds
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate({**variables, _BOUNDS: bounds}):
            bounds.check_time()
            size += len(piece)
            if size > MAX_PROMPT_TEXT_BYTES:
                raise TemplateInputError(f"the prompt has more than {MAX_PROMPT_TEXT_BYTES} characters")
            pieces.append(piece)
    except TemplateInputError:
        raise
    except RecursionError:
        raise TemplateDepthError from None
    # On unforeseen input a template may raise any exception: it may add a list to a string, for example.
    except Exception as error:
        raise TemplateInputError(_said(error)) from None
    return "".join(pieces)


def _said(error: Exception) -> str:
    """The error's message as one line, cut to fit a status: templates quote their input in messages."""
    line = " ".join(unmarked(str(error)).split())
    return line[:_LONGEST_MESSAGE] or type(error).__name__


# Names with blanks are no identifiers, so no template can use them.
_BOUNDS: Final = "fissile bounds"
_IN_TIME: Final = "fissile in time"
_JOINED: Final = "fissile joined"
_WRITTEN: Final = "fissile written"
_LARGE: Final = re.compile(r"\d{6}")


class TemplateBounds:
    """Budget of time and of made values, for renderings in this thread from now on.

    The time is the thread's CPU time: a busy machine must not look like a client's fault.
    """

    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_TEMPLATE_S
        self._room = MAX_TEMPLATE_WORK

    def check_time(self) -> None:
        """Raises TemplateInputError if the time is over."""
        if time.thread_time() > self._end:
            raise TemplateInputError(f"the template took longer than {MAX_TEMPLATE_S:g} s")

    def make(self, size: int) -> None:
        """Charges a value of `size` characters or entries. Raises TemplateInputError if it or the sum is too large."""
        self.check_time()
        self._room -= size
        if size > MAX_PROMPT_TEXT_BYTES or self._room < 0:
            raise TemplateInputError("the template makes values that are too large")


def _bounds(context: Context) -> TemplateBounds:
    bounds = context.get(_BOUNDS)
    # The context has no bounds while Jinja computes constants at compile time.
    return bounds if isinstance(bounds, TemplateBounds) else TemplateBounds()


def _size_of_binop(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the characters, entries or bits of an operator's result."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        large = bits * max(right, 1) if operator == "**" else bits + right.bit_length()
        return large if large > _MOST_BITS else 1
    if operator == "*":
        sized, times = (left, right) if isinstance(right, int) else (right, left)
        return _length(sized) * max(times, 0) * (1 if isinstance(sized, str) else 8) if isinstance(times, int) else 1
    if operator == "%" and isinstance(left, str):
        return _size_of_format(left, right)
    return (_length(left) + _length(right)) * (1 if isinstance(left, str) else 8)


# Most bits of a number that is charged as 1; a longer one is charged by its bits.
_MOST_BITS: Final = 1 << 14


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _size_of_format(text: str, *values: Any) -> int:
    widths = _LARGE.search(text) is not None or any(_is_large(value) for value in values)
    return MAX_TEMPLATE_WORK if widths else len(text) + _written_size(values)


def _written_size(value: Any) -> int:
    """Characters and entries of a value when it is written out.

    Repeated content counts each time: thirty lists, each twice in the next one, are a thousand million entries. The
    count visits each container once, without recursion.
    """
    known: dict[int, int] = {}
    # Keeps the entries of views alive: Python reuses the ids of dead objects.
    entries: dict[int, list[Any]] = {}
    stack = [value]
    while stack:
        top = stack[-1]
        if not isinstance(top, _CONTAINERS) or id(top) in known:
            stack.pop()
        elif (items := entries.get(id(top))) is None:
            entries[id(top)] = items = list(_items(top))
            stack.extend(item for item in items if isinstance(item, _CONTAINERS))
        else:
            known[id(top)] = 1 + sum(known.get(id(item), 0) or _length(item) for item in items)
    return known.get(id(value)) or _length(value)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    return chain(value, value.values()) if isinstance(value, dict) else value


# Types that hold other values, and are written, compared or hashed with them.
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, MappingView, Namespace)


def _size_of_sum(values: Any, start: Any) -> int:
    """Upper bound of the entries copied while lists are added one by one; 0 for numbers."""
    if not isinstance(values, list | tuple) or not isinstance(start, list | tuple | str):
        return 0
    return len(values) * (_length(start) + sum(map(_length, values)))


def _is_large(value: Any) -> bool:
    """True if `value`, or one of its entries as for `%`, is a number that would be too large as a width."""
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(each, int) and abs(each) >= 10**5 for each in values)


def _size_of_text_call(name: str, text: str, values: tuple[Any, ...]) -> int:
    """Upper bound of the characters that a text's method or filter makes; any large number counts as a width."""
    if name == "replace" and len(values) > 1 and isinstance(values[0], str):
        return len(text) + text.count(values[0]) * _length(values[1])
    if name == "join" and values and isinstance(values[0], list | tuple):
        return sum(map(_length, values[0])) + len(text) * len(values[0])
    if name in ("format", "format_map"):
        return _size_of_format(text, *values)
    if any(_is_large(value) for value in values):
        return MAX_TEMPLATE_WORK
    return len(text) * (1 + max((value for value in values if isinstance(value, int)), default=0) * (name in _PER_LINE))


# Filters and methods that add characters to every line, or at every tab.
_PER_LINE: Final = ("indent", "expandtabs")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja sandbox of transformers, with bounds on time and size."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls an object for the template, after checking the time and the size that a text's method would make."""
        bounds = _bounds(__context)
        bounds.check_time()
        # The sandbox wraps a text's method `format`: the wrapped one knows its text.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            bounds.make(_size_of_text_call(__obj.__name__, owner, (*args, *kwargs.values())))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes an operator, after charging the size of its result."""
        _bounds(context).make(_size_of_binop(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Template:
        tree = super()._parse(source, name, filename)
        _BoundChecks().visit(tree)
        return tree


class _BoundChecks(NodeTransformer):
    """Adds checks to a template: of the time in every turn of a loop, and of the sizes at `~` and comparisons."""

    def visit_For(self, node: For) -> For:
        """Adds a check of the time to the body of a loop."""
        self.generic_visit(node)
        look = Filter(Const(None), _IN_TIME, [], [], None, None)
        node.body.insert(0, ExprStmt(look).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: Concat) -> Node:
        """Bounds the result of `~`."""
        self.generic_visit(node)
        return Filter(List(node.nodes), _JOINED, [], [], None, None).set_lineno(node.lineno)

    def visit_Compare(self, node: Compare) -> Compare:
        """Bounds the first value of a comparison in which no value is a constant."""
        self.generic_visit(node)
        if not any(isinstance(each, Const) for each in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = Filter(node.expr, _WRITTEN, [], [], None, None)
            node.expr.set_lineno(node.lineno)
        return node


@pass_context
def _in_time(context: Context, value: Any) -> None:
    _bounds(context).check_time()


@pass_context
def _written_out(context: Context, value: Any) -> Any:
    """Charges a container that is about to be written or compared; returns the value."""
    if isinstance(value, _CONTAINERS):
        _bounds(context).make(_written_size(value))
    return value


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    _written_out(context, values)
    texts = [str(value) for value in values]
    _bounds(context).make(sum(map(len, texts)))
    return "".join(texts)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a Jinja filter, so that it charges the size of its result before it runs."""
    kind = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        _written_out(context, value)
        if name == "sum":
            _bounds(context).make(_size_of_sum(value, kwargs.get("start", args[1] if len(args) > 1 else 0)))
        elif name not in _GROWING_FILTERS:
            pass
        elif name == "join" and isinstance(value, list | tuple):
            separator = str(values[0]) if values else ""
            _bounds(context).make(_size_of_text_call(name, separator, (value,)))
        else:
            _bounds(context).make(_size_of_text_call(name, str(value) if isinstance(value, str) else "", values))
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        given = () if kind is None else (first[kind.name],)
        return function(*given, value, *args, **kwargs)

    return bounded


_GROWING_FILTERS: Final = ("center", "format", "indent", "join", "replace", "tojson", "wordwrap", "batch", "slice")
# Filters that write or compare a value together with all values in it.
_WRITING_FILTERS: Final = (
    *("capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "title", "trim"),
    *("truncate", "upper", "urlencode", "urlize", "wordcount", "xmlattr"),
    *("dictsort", "groupby", "max", "min", "sort", "sum", "unique"),
)


class _GenerationTag(Extension):
    """The `{% generation %}` tag, which marks the assistant's words for training; its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """Returns the statements of the tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace; refuses private names."""

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
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as in transformers: templates tell the model today's date.
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # `ensure_ascii` escapes the marks of special tokens: restore them, or the tokens would be unmarked.
    return text.replace("\\ufdd0", MARK_START).replace("\\ufdd1", MARK_END) if ensure_ascii else text


def compile_template(name: str, source: str) -> jinja2.Template:
    """Compiles a model's chat template for the sandbox.

    Raises:
        TokenizerError: the template has a syntax error, or is nested too deeply for Python's compiler.
    """
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_written_out
    )
    environment.filters["tojson"] = _tojson
    for name_of_filter in (*_GROWING_FILTERS, *_WRITING_FILTERS):
        environment.filters[name_of_filter] = _bounded_filter(name_of_filter, environment.filters[name_of_filter])
    environment.filters |= {_IN_TIME: _in_time, _JOINED: _joined, _WRITTEN: _written_out}
    # `lipsum` makes any amount of text, and transformers' templates do not have it.
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    try:
        return environment.from_string(source)
    except Exception as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TokenizerError(f"chat template {name!r}{line}: {getattr(error, 'message', error)}") from None
