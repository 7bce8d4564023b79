"""Failures of what only observes (logs, spans, figures): counted here, and raised into nobody's work."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeAlias

Signal: TypeAlias = Literal["logs", "traces", "metrics"]
_P = ParamSpec("_P")

_failures: Counter[str] = Counter()


def count_failure(signal: Signal) -> None:
    """One observation more is lost."""
    _failures[signal] += 1


def failures() -> Mapping[str, int]:
    """Observations of this process that were lost by a failure, by signal."""
    return dict(_failures)


def harmless(signal: Signal) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """A decorator for what observes and returns nothing: an exception is counted, and goes no further."""

    def decorate(observe: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(observe)
        def observed(*args: _P.args, **kwargs: _P.kwargs) -> None:
            try:
                observe(*args, **kwargs)
            except Exception:
                count_failure(signal)

        return observed

    return decorate
