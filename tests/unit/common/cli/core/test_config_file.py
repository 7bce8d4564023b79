"""Precedence of option values, and the errors for bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from common.cli.config import CONFIGURABLE, in_force
from common.cli.core.config_file import config_option
from common.cli.core.errors import CommandError
from common.cli.core.options import option
from common.cli.group import COMMANDS, find_entry_points
from common.cli.serve.command import make_fleet, refuse_twice_said, serve
from common.params.options.option import Option
from router.app import router


@click.command()
@config_option("made")
@option(Option("--number", "MADE_NUMBER", "A number.", ("made",), click.INT, 1))
@option(Option("--name", "MADE_NAME", "Names.", ("made",), parameter="names", is_repeatable=True))
@option(Option("--flag/--no-flag", "MADE_FLAG", "A flag.", ("made",), default=False))
def made(number: int, names: tuple[str, ...], flag: bool) -> None:
    click.echo(json.dumps([number, names, flag]))


def run(text: str, tmp_path: Path, *arguments: str, env: dict[str, str] | None = None) -> object:
    (tmp_path / "c.yaml").write_text(text)
    result = CliRunner().invoke(made, ["--config", str(tmp_path / "c.yaml"), *arguments], env=env)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


FULL = "made:\n  number: 5\n  name: [a, b]\n  flag: true\nother:\n  x: 1\n"


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    assert run("", tmp_path) == [1, [], False]
    assert run("made:\n", tmp_path) == [1, [], False]
    assert run(FULL, tmp_path) == [5, ["a", "b"], True]
    assert run(FULL, tmp_path, env={"MADE_NUMBER": "6"}) == [6, ["a", "b"], True]
    assert run(FULL, tmp_path, "--number", "7", "--no-flag", env={"MADE_NUMBER": "6"}) == [7, ["a", "b"], False]


@pytest.mark.parametrize("word", ["off", "no", "on", "yes"])
def test_yaml_1_1_boolean_words_are_strings(word: str, tmp_path: Path) -> None:
    """`weights-cache: off` and `quantize: no` mean the same as on the command line; flags accept these words."""
    text = f"made:\n  name: [{word}]\n  flag: {word}\n"
    assert run(text, tmp_path) == [1, [word], word in ("on", "yes")]
    assert run("made:\n  flag: false\n", tmp_path) == [1, [], False]


# Nine levels of nine references each.
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("made:\n  nmber: 5\n", "made.nmber is not an option of `made`; allowed: flag, name, number"),
        ("made: 5\n", "made is not a mapping"),
        ("- made\n", "is not a mapping"),
        ("made: {\n", "is not YAML"),
        ("[" * 3000, "is nested too deeply"),
        ("made: " + "{a: " * 600, "is nested too deeply"),
        (ALIASES, "has more than 100000 values, with its aliases"),
        ("made: &a [*a]\n", "has more than 100000 values, with its aliases"),
        ("#" * 2_000_000, "has more than 1048576 bytes"),
    ],
)
def test_bad_configuration_file_error_is_one_line(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"c\.yaml") as caught:
        run(text, tmp_path)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_and_merges_of_a_plain_file_are_read(tmp_path: Path) -> None:
    text = "names: &names [a, b]\nmore: &more {number: 5}\nmade: {<<: *more, name: *names}\n"
    assert run(text, tmp_path) == [5, ["a", "b"], False]


def test_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        in_force(made, "made", ("--config", str(tmp_path / "none.yaml")))


def test_show_names_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("router:\n  max-hold: 100ms\n  tenant-weight: [gold=4]\n  queue-size: 9\n  worker: [a:1, b:2]\n")
    monkeypatch.setenv("FISSILE_QUEUE_SIZE", "11")
    rows = in_force(router, "router", ("--config", str(path), "--delay-factor", "2"))
    shown = {name: (value, source) for name, value, source in rows}
    assert shown["delay-factor"] == ("2.0", "command line")
    assert shown["queue-size"] == ("11", "environment FISSILE_QUEUE_SIZE")
    assert shown["max-hold"] == ("0.1s", "--config file")
    assert (shown["lease"], shown["audit"]) == (("5s", "default"), ("0%", "default"))
    assert shown["tenant-weight"] == ("gold=4.0", "--config file")
    assert shown["worker"] == ("a:1,b:2", "--config file")
    assert shown["placement"] == ("prefix_aware", "default")


def test_config_show_refuses_values_the_command_refuses(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("router:\n  max-hold: soon\n")
    with pytest.raises(CommandError, match="use for example 250ms"):
        in_force(router, "router", ("--config", str(path)))


@pytest.mark.parametrize("name", CONFIGURABLE)
def test_every_command_with_a_file_shows_its_sources(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `make check-fresh` sets it.
    monkeypatch.delenv("FISSILE_PORT", raising=False)
    path = tmp_path / "fleet.yaml"
    path.write_text("serve: {port: 7}\nworker: {port: 7, model: m}\nrouter: {port: 7}\n")
    rows = in_force(find_entry_points(COMMANDS)[name].load(), name, ("--config", str(path), "--log-level", "debug"))
    shown = {option: (value, source) for option, value, source in rows}
    assert shown["port"] == ("7", "--config file")
    assert shown["log-level"] == ("debug", "command line")
    assert shown["host"] == ("127.0.0.1", "default")


def test_serve_refuses_file_options_it_overrules(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("serve: {workers: 2}\nworker: {step-timeout: 7}\nrouter: {placement: round_robin}\n")
    context = serve.make_context("serve", ["--config", str(path), "--simulate", "instant", "--admin-port", "5"])
    own = {"ask", "prompt", "once", "tls_cert", "tls_key", "tls_client_ca", "api_keys"}
    options = {name: value for name, value in context.params.items() if name not in own}
    fleet = make_fleet(protection={}, **options)
    assert len(fleet.worker_ports) == 2
    assert "--admin-port 5" in " ".join(fleet.children()[0].arguments)
    refuse_twice_said(fleet, path)
    for text in ("router: {port: 7}", "worker: {prefix-caching: false}", "worker: {log-level: debug}"):
        path.write_text(text)
        with pytest.raises(CommandError, match="is set by `fissile serve`: say it in its section"):
            refuse_twice_said(fleet, path)
    for text in ("router: {tls-cert: a.pem}", "router: {api-keys: keys}", "router: {api-key-line: [x]}"):
        path.write_text(text)
        with pytest.raises(CommandError, match="`fissile serve` must know of it"):
            refuse_twice_said(fleet, path)


def test_serve_passes_audit_options_to_router(tmp_path: Path) -> None:
    folder = tmp_path / "wrong"
    context = serve.make_context(
        "serve", ["--simulate", "instant", "--audit", "0.1%", "--audit-dir", str(folder), "--no-audit-kv"]
    )
    own = {"ask", "prompt", "once", "tls_cert", "tls_key", "tls_client_ca", "api_keys"}
    options = {name: value for name, value in context.params.items() if name not in own}
    child = make_fleet(protection={}, **options).children()[0]
    given = router.make_context("router", list(child.arguments)).params
    assert (given["audit"], given["audit_dir"], given["audit_kv"]) == (pytest.approx(0.001), folder, False)


def test_bad_configuration_value_is_named_with_line(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    text = (
        "# the fleet\nrouter:\n  worker: [a:1]\n  tenant-weight:\n    - gold=4\n    - gold=never\n  queue-size: many\n"
    )
    path.write_text(text)
    with pytest.raises(CommandError) as caught:
        in_force(router, "router", ("--config", str(path)))
    # click reads options in the order in which the command declares them.
    assert str(caught.value).startswith(f"--config {path}, line 7: router.queue-size: 'many' is not a valid integer")
    with pytest.raises(CommandError) as caught:
        in_force(router, "router", ("--config", str(path), "--queue-size", "5"))
    assert str(caught.value).startswith(f"--config {path}, line 4: router.tenant-weight: 'gold=never' is not")
    # An option of the command line needs no valid value in the file.
    with pytest.raises(CommandError) as caught:
        in_force(router, "router", ("--config", str(path), "--queue-size", "few"))
    assert "line" not in str(caught.value)
    path.write_text("router:\n  placement: least_loaded\n  colour: red\n")
    with pytest.raises(CommandError, match=r"line 3: router\.colour is not an option of `router`; allowed:"):
        in_force(router, "router", ("--config", str(path)))
