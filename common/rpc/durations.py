"""Conversion between seconds and `google.protobuf.Duration`."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def to_duration(seconds: float | None) -> Duration:
    """The Duration of `seconds`; zero for None."""
    duration = Duration()
    duration.FromNanoseconds(round((seconds or 0.0) * 1e9))
    return duration


def to_seconds(duration: Duration) -> float:
    """A Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9
