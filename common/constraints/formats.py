"""Stricter schemas for formats of JSON Schema, where the library's own expressions allow too much.

They also leave out some valid texts, because not every validator accepts them: the year 0, leap seconds, host names
with two hyphens in the third and fourth place (reserved for other alphabets), mail addresses at a host without a dot or
at an IP address, and URIs with nothing between colon and query.
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
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LONG: Final = "(?:[A-Za-z0-9]-?){0,30}[A-Za-z0-9]"
_SHORT: Final = "(?:[A-Za-z0-9]-?){0,9}[A-Za-z0-9]"
# These replace the library's expressions: length bounds in addition to those would be too much work. A local part has
# up to 64 characters (32 and dots in between if it has dots), a host up to 223.
INSTEAD: Final[Mapping[str, str]] = {
    "email": rf"^(?:{_ATOM}{{1,64}}|{_ATOM}(?:\.?{_ATOM}){{0,31}})@(?:{_LONG}\.){{1,2}}(?:{_SHORT}\.){{0,4}}{_SHORT}$",
}
FURTHER: Final[Mapping[str, tuple[dict[str, Any], ...]]] = {
    "date": _DATES,
    "date-time": (*_DATES, {"pattern": "^[^:]*:[0-9]{2}:[0-5]"}),
    "time": ({"pattern": "^[0-9]{2}:[0-9]{2}:[0-5]"},),
    "uri": ({"pattern": "^[^:]*:[^?#]"},),
    "hostname": ({"maxLength": 253}, {"pattern": rf"^(?:{_LABEL}\.)*{_LABEL}\.?$"}),
}
