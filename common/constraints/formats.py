"""Further schemas for what formats of JSON Schema say beyond the library's expressions for them.


Some texts that a format has are left out as well, as not every validator takes them: the year 0, leap seconds, and
host names with two hyphens in the third and fourth place, which are those of other alphabets if they are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

FORMATS: Final = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
_LEAP_YEAR: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATES: Final = (
    {"pattern": f"^[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|^{_LEAP_YEAR}-02-29"},
    {"pattern": "^[0-9]{0,3}[1-9]"},
)
_LABEL: Final = r"(?:[^.]{1,3}|[^.]{2}(?:[^.-][^.]|-[^.-])[^.]*)"
FURTHER: Final[Mapping[str, tuple[dict[str, Any], ...]]] = {
    "date": _DATES,
    "date-time": (*_DATES, {"pattern": "^[^:]*:[0-9]{2}:[0-5]"}),
    "time": ({"pattern": "^[0-9]{2}:[0-9]{2}:[0-5]"},),
    "hostname": ({"maxLength": 253}, {"pattern": rf"^(?:{_LABEL}\.)*{_LABEL}\.?$"}),
}
