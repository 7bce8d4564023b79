"""HTTP client of `huggingface_hub` with bounds: the library trusts whatever answers at HF_ENDPOINT.

Without bounds it reads an answer of any length into memory, waits for an answer without an end, sleeps as long as a
header says, and writes a file whose name is a header of the answer, also one that leads out of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from common.hub import HubError
from common.limits import MAX_WEIGHT_INDEX_BYTES

if TYPE_CHECKING:
    import httpx2

# Seconds without any byte after which a hub counts as lost, where the library sets no limit.
_SILENCE_S: Final = 60.0
# Longest pause of the library before it asks again.
_LONGEST_WAIT_S: Final = 60
# Headers that the library makes names of files from, with the characters that it strips on the left first.
_NAMES: Final = {"ETag": "W/", "X-Linked-Etag": "W/", "X-Repo-Commit": ""}
_FILE_STATUSES: Final = (200, 206)
_FIRST_ERROR: Final = 400
_TOO_MANY_REQUESTS: Final = 429
# Any longer pause counts as this one, also one of a thousand digits.
_LONGEST_PAUSE_S: Final = 10**9


def import_library() -> None:
    """Imports `huggingface_hub`, which takes half a second and reads its settings from the environment.

    Raises:
        HubError: a setting is malformed.
    """
    try:
        from huggingface_hub import constants  # noqa: F401, PLC0415
    except ValueError as error:
        raise HubError(f"a variable HF_* of the environment, such as HF_ENDPOINT, is malformed: {error}") from None


@cache
def bound_answers() -> None:
    """Gives the library a client whose answers have bounds, once in a process."""
    from huggingface_hub import set_client_factory  # noqa: PLC0415

    set_client_factory(_client)


def _client() -> httpx2.Client:
    from huggingface_hub.utils._http import default_client_factory  # noqa: PLC0415

    client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _limit_silence],
        "response": [*hooks["response"], _check_answer],
    }
    return client


def _limit_silence(request: httpx2.Request) -> None:
    limits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        each: limits.get(each) or _SILENCE_S for each in ("connect", "read", "write", "pool")
    }
    # Compressed answers have no length that could be compared.
    request.headers["Accept-Encoding"] = "identity"


def _check_answer(response: httpx2.Response) -> None:
    """Checks the headers of an answer, and bounds its body unless it is a file's content.

    Raises:
        HubError: a header leads out of the cache, or the hub wants a long pause.
    """
    host = response.request.url.host
    for name, stripped in _NAMES.items() if response.request.method == "HEAD" else ():
        value = response.headers.get(name, "")
        if stripped:
            value = value.lstrip(stripped).strip('"')
        if value in (".", "..") or {"/", "\\", "\0"}.intersection(value):
            raise HubError(f"{host} sends the {name} {value!r}, which cannot be a file's name; check HF_ENDPOINT")
    if response.status_code >= _FIRST_ERROR and (wait := _pause_s(response)) > _LONGEST_WAIT_S:
        if response.status_code == _TOO_MANY_REQUESTS:
            raise HubError(too_many_requests(host, response))
        raise HubError(f"{host} answers with status {response.status_code}: try again in {wait} s")
    if response.status_code not in _FILE_STATUSES or "/api/" in response.request.url.path:
        response.stream = _bounded(response.stream, host)


def _pause_s(response: Any) -> int:
    """Seconds that the library would wait after an error; 0 if the hub names none, or a date."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # noqa: PLC0415

    value = response.headers.get("Retry-After", "").strip()
    pause = float(value) if value.isdecimal() else 0.0
    # The Hub sends `RateLimit` with every answer; the library waits for its end only after 429 and with none left.
    limit = parse_ratelimit_headers(response.headers) if response.status_code == _TOO_MANY_REQUESTS else None
    if limit is not None and limit.remaining == 0:
        pause = max(pause, limit.reset_in_seconds)
    return int(min(pause, _LONGEST_PAUSE_S))


def too_many_requests(hub: str, response: Any) -> str:
    """Error message for an answer with status 429."""
    when = f"in {wait} s" if (wait := _pause_s(response)) else "later"
    return f"{hub} limits how often it is asked: try again {when}, or set HF_TOKEN for a higher limit"


def _bounded(body: Any, host: str) -> httpx2.SyncByteStream:
    import httpx2  # noqa: PLC0415

    class BoundedBody(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            left = MAX_WEIGHT_INDEX_BYTES
            for piece in body:
                left -= len(piece)
                if left < 0:
                    raise HubError(f"{host} answers with more than {MAX_WEIGHT_INDEX_BYTES} bytes; check HF_ENDPOINT")
                yield piece

        def close(self) -> None:
            body.close()

    return BoundedBody()
