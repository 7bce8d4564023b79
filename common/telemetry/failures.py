"""Counts failures of observations (logs, spans, figures), which must never fail the observed work."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Literal, ParamSpec, TypeAlias, get_args

Signal: TypeAlias = Literal["logs", "traces", "metrics"]
# Of a span: the collector took it; the collector did not take it; too many spans waited.
SpanResult: TypeAlias = Literal["exported", "refused", "dropped"]
_P = ParamSpec("_P")

_failures: Counter[str] = Counter()
_spans: Final = Counter[str](dict.fromkeys(get_args(SpanResult), 0))


def count_failure(signal: Signal) -> None:
    """Counts one lost observation."""
    _failures[signal] += 1


def failures() -> Mapping[str, int]:
    """Number of observations that this process has lost by a failure, by signal."""
    return dict(_failures)


def count_spans(result: SpanResult, number: int = 1) -> None:
    """Counts spans that left this process with this result."""
    _spans[result] += number


def span_counts() -> Mapping[str, int]:
    """Number of spans that have left this process, by result."""
    return dict(_spans)


def harmless(signal: Signal) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Decorator for a function that observes and returns nothing: an exception is counted and swallowed."""

    def decorate(observe: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(observe)
        def observed(*args: _P.args, **kwargs: _P.kwargs) -> None:
            try:
                observe(*args, **kwargs)
            except Exception:
                count_failure(signal)

        return observed

    return decorate
