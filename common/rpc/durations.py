"""Conversion between seconds and `google.protobuf.Duration`."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from common.errors import InvalidFieldError

# Largest Duration, in seconds (google/protobuf/duration.proto).
_MAX_SECONDS = 315_576_000_000


def to_duration(seconds: float | None) -> Duration:
    """The Duration of `seconds`; zero for None."""
    duration = Duration()
    duration.FromNanoseconds(round((seconds or 0.0) * 1e9))
    return duration


def to_seconds(duration: Duration) -> float:
    """A Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9


def checked_seconds(path: str, duration: Duration, least: float = 0.0, most: float = _MAX_SECONDS) -> float:
    """A client's Duration in seconds, checked.

    Args:
        path: of the field, for the error.
        duration: as the client sent it.
        least: shortest valid, seconds.
        most: longest valid, seconds.

    Raises:
        InvalidFieldError: it is malformed or out of range.
    """
    whole, nanos = duration.seconds, duration.nanos
    same_sign = whole == 0 or nanos == 0 or (whole > 0) == (nanos > 0)
    seconds = to_seconds(duration)
    if not same_sign or abs(nanos) > 999_999_999 or not least <= seconds <= most:
        valid = f"a duration of at least {least:g} s" + ("" if most == _MAX_SECONDS else f" and at most {most:g} s")
        raise InvalidFieldError(path, f"is {seconds:g} s", valid)
    return seconds
