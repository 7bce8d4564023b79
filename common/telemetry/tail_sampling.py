"""Keeps the spans of slow and failed requests that the sampler would drop. Every span is recorded while this is on.

A span without a parent in this process is a root. The spans below it wait in memory until it ends; then all of them are
exported, or all are dropped. Sampled spans are exported at once.

Invariant: at most `max_held` spans wait. Beyond that the spans of the oldest root are dropped.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import Attributes

from common.limits import MAX_HELD_SPANS
from common.telemetry.failures import count_spans


class RecordAll(Sampler):
    """Records every span; another sampler says which ones are sampled.

    Args:
        sampler: the other sampler.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """The other sampler's result, with RECORD_ONLY in place of DROP."""
        result = self._sampler.should_sample(parent_context, trace_id, name, kind, attributes, links)
        if result.decision is not Decision.DROP:
            return result
        return SamplingResult(Decision.RECORD_ONLY, attributes, result.trace_state)

    def get_description(self) -> str:
        """Name of the sampler, for logs."""
        return f"RecordAll{{{self._sampler.get_description()}}}"


class SlowSpanKeeper(SpanProcessor):
    """Passes on the spans that are sampled, and those below a root that was slow or failed.

    Args:
        following: exports spans.
        slow_s: a root that took at least this time, in seconds, was slow.
        max_held: most spans that wait for the end of their roots.
    """

    def __init__(self, following: SpanProcessor, slow_s: float, max_held: int = MAX_HELD_SPANS) -> None:
        self._following = following
        self._slow_ns = slow_s * 1e9
        self._max_held = max_held
        self._num_held = 0
        # Spans that wait, by the id of their root; the root that began to wait first comes first.
        self._held: OrderedDict[int, list[ReadableSpan]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_held(self) -> int:
        """Number of spans that wait for the end of their roots."""
        return self._num_held

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Does nothing."""

    def on_end(self, span: ReadableSpan) -> None:
        """Exports, holds or drops a span."""
        context, parent = span.context, span.parent
        if context is None:
            return
        if context.trace_flags.sampled:
            self._following.on_end(span)
        elif parent is not None and not parent.is_remote:
            # What it kept waiting waits for the same root now.
            self._hold(parent.span_id, [*self._take(context.span_id), span])
        else:
            below = self._take(context.span_id)
            if self._is_kept(span):
                for each in (*below, span):
                    self._following.on_end(_sampled(each))

    def shutdown(self) -> None:
        """Drops the waiting spans, and exports what was passed on."""
        with self._lock:
            self._held.clear()
            self._num_held = 0
        self._following.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """True if what was passed on was exported in time."""
        return self._following.force_flush(timeout_millis)

    def _hold(self, root: int, spans: list[ReadableSpan]) -> None:
        with self._lock:
            self._held.setdefault(root, []).extend(spans)
            self._num_held += len(spans)
            while self._num_held > self._max_held:
                dropped = len(self._held.popitem(last=False)[1])
                self._num_held -= dropped
                count_spans("dropped", dropped)

    def _take(self, root: int) -> list[ReadableSpan]:
        with self._lock:
            spans = self._held.pop(root, [])
            self._num_held -= len(spans)
        return spans

    def _is_kept(self, root: ReadableSpan) -> bool:
        if root.status.status_code is StatusCode.ERROR:
            return True
        return (root.end_time or 0) - (root.start_time or 0) >= self._slow_ns


def _sampled(span: ReadableSpan) -> ReadableSpan:
    """A copy with the flag `sampled`, without which exporters drop it."""
    old = span.context
    assert old is not None
    context = SpanContext(old.trace_id, old.span_id, old.is_remote, TraceFlags(TraceFlags.SAMPLED), old.trace_state)
    given = span.parent, span.resource, span.attributes, span.events, span.links, span.kind, None, span.status
    return ReadableSpan(span.name, context, *given, span.start_time, span.end_time, span.instrumentation_scope)
