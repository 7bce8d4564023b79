"""The command line as a whole: its commands, imports and errors."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from common.cli import group, main
from common.cli.client.generate import generate, given
from common.cli.core.client import Question
from common.cli.core.errors import CommandError
from common.constraints.forms import FORMS
from common.params.sampling_params import SamplingParams
from common.version import fissile_version

ROOT = Path(__file__).resolve().parents[4]


def fissile(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.cli.main", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_lists_every_command() -> None:
    result = fissile("--help")
    assert result.returncode == 0
    for name, summary in group.SUMMARIES.items():
        assert f"  {name} " in result.stdout
        assert summary in result.stdout


def test_pyproject_commands_match_summaries() -> None:
    assert group.find_entry_points(group.COMMANDS).keys() == group.SUMMARIES.keys()


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("version",), ("serve", "--help"), ("generate", "--help"), ("bench", "--help")],
)
def test_light_commands_import_neither_torch_nor_the_services(arguments: tuple[str, ...]) -> None:
    program = (
        "import sys; from common.cli.group import run\n"
        f"sys.argv[1:] = {list(arguments)!r}\n"
        "run(); heavy = {'torch', 'transformers', 'tokenizers', 'router', 'worker', 'kernels'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_version_as_json() -> None:
    versions = json.loads(fissile("version", "--json").stdout)
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"fissile", "grpcio", "protobuf", "torch"} <= versions.keys()


def test_works_from_a_plain_checkout(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "common", tmp_path / "common")
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # Hides installed metadata and the checkout's path, as if fissile were not installed.
    program = (
        "import importlib.metadata as m, sys\n"
        "m.entry_points = lambda **_: []\n"
        f"sys.path[:] = ['.'] + [p for p in sys.path if p and not p.startswith({str(ROOT)!r}) or 'site-' in p]\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "from common.cli.group import run\n"
        "sys.exit(run())"
    )
    command = [sys.executable, "-c", program, "models", "--address", "127.0.0.1:1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr.count("\n")) == (3, 1), result.stderr
    assert "no router can be reached at 127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "No such command 'nope'"),
        pytest.param(("serve", "--nope"), "No such option", marks=pytest.mark.slow),
        (("serve", "--workers", "0"), "'--workers'"),
        pytest.param(("serve", "--port", "x"), "'--port'", marks=pytest.mark.slow),
        pytest.param(("serve", "--log-level", "loud"), "'--log-level'", marks=pytest.mark.slow),
        (("generate",), "the prompt is empty"),
        (("generate", "hi", "--temperature", "-1"), "sampling_params.temperature"),
        pytest.param(("generate", "hi", "--max-tokens", "-3"), "sampling_params.max_tokens", marks=pytest.mark.slow),
        pytest.param(("generate", "hi", "--temperature", "nan"), "sampling_params.temperature", marks=pytest.mark.slow),
        pytest.param(
            ("generate", "hi", "--repetition-penalty", "0"),
            "sampling_params.repetition_penalty",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_refuses_with_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = fissile(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_generate_has_an_option_for_every_parameter_but_a_few() -> None:
    """Exceptions: several answers are unsupported, a constraint has an option per form, the rest is for programs."""
    left_out = {"n", "include_stop_string", "stop_token_sequences", "bad_words_token_ids", "constraint", "grammar"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)} - left_out
    options = {parameter.name: parameter for parameter in generate.params}
    assert fields | set(FORMS) <= options.keys()
    names = [name for name in fields if options[name].type.name in ("integer", "float") and not options[name].multiple]
    with generate.make_context("generate", ["hi", *(f"--{n.replace('_', '-')}=1" for n in names)]) as context:
        assert given({name: context.params[name] for name in fields}) == dict.fromkeys(names, 1)


def test_constraint_option_has_one_form(tmp_path: Path) -> None:
    """A schema or grammar is given as text or as a file name."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}', "utf-8")
    assert given({"json_schema": str(file)}) == {"constraint": {"json_schema": '{"type": "null"}'}}
    assert given({"grammar": "start: /" + "a" * 5000 + "/"}) == {
        "constraint": {"grammar": "start: /" + "a" * 5000 + "/"}
    }
    assert given({"choices": ("a", "b"), "regex": None}) == {"constraint": {"choices": ("a", "b")}}
    with pytest.raises(CommandError, match="give one of --json-object, --regex"):
        given({"json_object": True, "regex": "a"})
    with pytest.raises(CommandError, match="at most 65536 bytes"):
        given({"regex": "a" * 70_000})
    assert Question("p", sampling=given({"choices": ("a", "b")})).sampling_params.constraint.choices.texts == ["a", "b"]


def test_generate_help_names_default_max_tokens() -> None:
    """Without `max_tokens` the router's limit applies; offline, the default of `LLMEngine`."""
    said = {each.name: each.help or "" for each in generate.params if isinstance(each, click.Option)}
    assert "Default: the router's, or the rest of the context" in said["max_tokens"]
    assert f"--max-tokens is then {SamplingParams().max_tokens} by default" in said["offline"]


def test_environment_variables_set_options() -> None:
    result = fissile("models", FISSILE_ADDRESS="127.0.0.1:2")
    assert "127.0.0.1:2" in result.stderr
    result = fissile("serve", FISSILE_NUM_WORKERS="-1")
    assert result.returncode == 2
    assert "FISSILE_NUM_WORKERS" in result.stderr


@pytest.mark.parametrize("name", group.SUMMARIES)
def test_every_option_has_a_help_text_and_an_environment_variable(name: str) -> None:
    command = group.find_entry_points(group.COMMANDS)[name].load()
    for each in command.commands.values() if isinstance(command, click.Group) else [command]:
        options = [parameter for parameter in each.params if isinstance(parameter, click.Option)]
        assert options
        for option in options:
            assert option.help, option.name
            assert str(option.envvar).startswith("FISSILE_"), option.name
            assert option.show_envvar, option.name
        variables = [option.envvar for option in options]
        assert len(set(variables)) == len(variables)


def test_missing_extra_is_named_by_command() -> None:
    program = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "import click; from importlib.metadata import EntryPoint; from common.cli import group\n"
        "group.find_entry_points = lambda _: {'router': EntryPoint('router', 'tokenizers:router', group.COMMANDS)}\n"
        "sys.argv[1:] = ['router']; sys.exit(group.run())"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        "error: `fissile router` needs tokenizers, which is not installed here. In a checkout of Fissile: "
        "pip install ./protos '.[router]' (or make setup)\n"
    )


def test_old_python_is_refused_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit) as refused:
        main.main()
    assert refused.value.code == 2
    error = capsys.readouterr().err
    assert error == f"error: Fissile needs Python 3.11 or newer, this is 3.9: {sys.executable}\n"


@pytest.mark.parametrize("path", ["common/cli/main.py", "common/cli/__init__.py", "common/__init__.py"])
def test_version_check_parses_on_old_python(path: str) -> None:
    ast.parse((ROOT / path).read_text(encoding="utf-8"), feature_version=(3, 5))
    assert "from __future__" not in (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serv"], "No such command 'serv'. Did you mean serve? (`fissile --help` lists what there is)"),
        (["bench", "ofline"], "Did you mean offline?"),
        (["keys", "nwe"], "Did you mean new?"),
        (["config", "shwo"], "Did you mean show?"),
        (["xyzzy"], "No such command 'xyzzy'. (`fissile --help` lists what there is)"),
    ],
)
def test_unknown_command_error_suggests_nearest(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fissile", *arguments])
    assert group.run() == 2
    assert said in capsys.readouterr().err


def test_version_option_prints_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["fissile", "--version"])
    assert group.run() == 0
    assert capsys.readouterr().out == f"fissile {fissile_version()}\n"
