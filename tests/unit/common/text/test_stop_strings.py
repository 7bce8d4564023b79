"""Stop strings against brute force, for every way of cutting the text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.stop_strings import StopStrings

LETTERS = st.text("ab", min_size=1, max_size=4)


def brute_force(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The text up to the match that ends first, or the longest of several that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def held(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that begins a stop string."""
    sizes = range(max(map(len, stops), default=1) - 1, 0, -1)
    return next((n for n in sizes if n <= len(text) and any(stop.startswith(text[-n:]) for stop in stops)), 0)


@settings(max_examples=300)
@given(
    stops=st.lists(LETTERS, max_size=4).map(tuple),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
    include=st.booleans(),
)
def test_stop_string_search_equals_brute_force(stops: tuple[str, ...], pieces: list[str], include: bool) -> None:
    search = StopStrings(stops, include)
    emitted, matched, seen = "", None, ""
    for piece in pieces:
        result = search.push(piece)
        emitted, matched, seen = emitted + result.emit, result.matched, seen + piece
        if matched is None:
            assert len(emitted) == len(seen) - held(seen, stops)
    if matched is None:
        emitted += search.flush()

    assert (emitted, matched) == brute_force("".join(pieces), stops, include)


def test_no_text_follows_a_stop_match() -> None:
    search = StopStrings(("END",), include=True)

    assert search.push("one EN").emit == "one "
    assert search.push("D two").emit == "END"
    assert (search.push(" three").emit, search.flush()) == ("", "")
    assert search.push("").matched == "END"


def test_text_passes_unchanged_without_stop_strings() -> None:
    search = StopStrings((), include=False)

    assert (search.push("text").emit, search.flush()) == ("text", "")


def test_long_stop_strings_cost_one_step_per_character() -> None:
    stops = tuple("a" * 255 + letter for letter in "bcdefghijklmnopq")
    search = StopStrings(stops, include=False)
    steps = 200_000

    emitted = sum(len(search.push("a").emit) for _ in range(steps))

    # Text is held back exactly while it could begin a stop string. Searching the held text again would take minutes.
    assert emitted == steps - 255
