from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from common.cli.group import fissile
from common.params.options.types import AsWritten, ByteSize, Duration, Sizes

# Words in the names of options that are durations.
_TIMES = {"timeout", "deadline", "interval", "wait", "lease", "age", "hold"}


def options(command: click.Command, name: str = "") -> Iterator[tuple[str, click.Option]]:
    """All options of a command and its subcommands, by the command's name."""
    yield from ((f"{name} {each.opts[0]}", each) for each in command.params if isinstance(each, click.Option))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from options(found, f"{name} {child}".strip())


def test_duration_options_share_one_format() -> None:
    """Regression: the router accepted FISSILE_DRAIN_TIMEOUT=40s, worker and serve refused it."""
    times = {name: each for name, each in options(fissile) if _TIMES & set(each.opts[0].split("-"))}
    assert {"serve --drain-timeout", "worker --drain-timeout", "router --drain-timeout"} <= set(times)
    assert {name for name, each in times.items() if not isinstance(each.type, Duration)} == set()
    for each in times.values():
        assert each.type.convert("40s", each, None) == each.type.convert("40", each, None) == 40.0


def test_every_unit_of_durations() -> None:
    texts = ("35ms", "1.5s", ".25", "2", "5m", "0.5h")
    assert [Duration().convert(text, None, None) for text in texts] == [0.035, 1.5, 0.25, 2.0, 300.0, 1800.0]
    for text in ("1d", "5 m", "-1s", "s", "1e3"):
        with pytest.raises(click.BadParameter, match=f"'{text}' is not a duration; use for example 250ms"):
            Duration().convert(text, None, None)


def grammar(option: click.Option) -> tuple[object, ...]:
    """The values that the option's variable accepts."""
    kind = option.type
    limits = (getattr(kind, "min", None), getattr(kind, "max", None), tuple(getattr(kind, "choices", ())))
    return kind.name, *limits, option.multiple, option.is_flag


def test_environment_variable_means_same_for_all_commands() -> None:
    """Regression: `serve` accepted FISSILE_KV_CACHE_MEMORY=much, and its worker exited again and again."""
    grammars: dict[object, set[tuple[object, ...]]] = {}
    for _, each in options(fissile):
        grammars.setdefault(each.envvar, set()).add(grammar(each))
    assert {variable: found for variable, found in grammars.items() if len(found) > 1} == {}
    assert AsWritten(ByteSize()).convert("2GiB", None, None) == "2GiB"
    with pytest.raises(click.BadParameter, match="'much' is not a size"):
        AsWritten(ByteSize()).convert("much", None, None)


def test_duration_out_of_range_error_names_range() -> None:
    with pytest.raises(click.BadParameter, match="90s is out of range; use 1s to 60s"):
        Duration(1, 60).convert("90s", None, None)
    with pytest.raises(click.BadParameter, match=r"0 is out of range; use 0.1s or more"):
        Duration(0.1).convert("0", None, None)


def test_sizes() -> None:
    assert Sizes().convert("1,2, 8", None, None) == (1, 2, 8)
    assert Sizes().convert((4,), None, None) == (4,)


@pytest.mark.parametrize("text", ["", "0", "1,", "1,x", "-2", "1.5"])
def test_invalid_size_list_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a list of sizes; use for example 1,2,8"):
        Sizes().convert(text, None, None)


def test_bytes() -> None:
    assert ByteSize().convert("1.5GiB", None, None) == 3 << 29
    with pytest.raises(click.BadParameter, match="'2 apples' is not a size"):
        ByteSize().convert("2 apples", None, None)
