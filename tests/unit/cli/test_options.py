from __future__ import annotations

import click
import pytest

from common.cli.options import ByteSize, Sizes


def test_sizes() -> None:
    assert Sizes().convert("1,2, 8", None, None) == (1, 2, 8)
    assert Sizes().convert((4,), None, None) == (4,)


@pytest.mark.parametrize("text", ["", "0", "1,", "1,x", "-2", "1.5"])
def test_what_is_no_list_of_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no list of sizes; use for example 1,2,8"):
        Sizes().convert(text, None, None)


def test_bytes() -> None:
    assert ByteSize().convert("1.5GiB", None, None) == 3 << 29
    with pytest.raises(click.BadParameter, match="'2 apples' is no size"):
        ByteSize().convert("2 apples", None, None)
