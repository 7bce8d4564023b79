"""Every command uses or refuses each of its options, in each mode."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest

from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand, unused_variables
from common.cli.group import COMMANDS, fissile
from common.config import Config
from common.params.options.types import AsWritten, Bias, ByteSize, Duration, Fraction, Line, Sizes
from common.params.sampling_params import SamplingParams
from tests.commands import LEAVES, names_of
from tests.e2e.simulated import simulated_model
from worker.cli.worker import worker
from worker.cli.worker_options import worker_options
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine_factory import EngineOptions, build_engine
from worker.progress import StartProgress
from worker.server import WorkerOptions


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and param.expose_value]


_EXAMPLES: dict[type[click.ParamType[Any]], str] = {
    Duration: "2s", ByteSize: "1MiB", Fraction: "50%", Sizes: "2",
    Line: "x", Bias: "1=2",
}  # fmt: skip
_TEXTS = {
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}',
    "simulate": "instant",
    "dist_init": "tcp://127.0.0.1:4100",
    "lease_s": "4s",
    "addresses": "h:1",
    "address": "h:1",
    "tenant_weight": "a=2",
    "tenant_concurrency": "2",
    "tenant_max_priority": "low",
    "slo": "ttft=1s",
    "rate": "1",
    "concurrency": "2",
    "tool_commands": "a=b",
    "doors": "openengine",
}


def written(param: click.Option) -> list[str]:
    """An option as command-line arguments, with a value other than its default."""
    if param.is_flag:
        return [param.secondary_opts[0] if param.default is True else param.opts[0]]
    name, kind = param.name or "", param.type
    if isinstance(kind, AsWritten):
        kind = kind.checked
    if isinstance(kind, click.Choice):
        value = next(str(choice) for choice in kind.choices if choice != param.default)
    elif name in _TEXTS:
        value = _TEXTS[name]
    elif type(kind) in _EXAMPLES:
        value = _EXAMPLES[type(kind)]
    elif isinstance(kind, click.types.FloatParamType):
        value = "0.5"
    elif isinstance(kind, click.types.IntParamType):
        least = int(kind.min or 0) if isinstance(kind, click.IntRange) else 0
        value = str(least + 2)
    else:
        value = "text"
    return [param.opts[0], value]


def parsed(command: click.Command, arguments: Sequence[str]) -> click.Context:
    return command.make_context("fissile", list(arguments))


# Arguments that select each mode, by the command and the mode's name.
ON = {
    ("worker", "with --node-rank 1 or more"): "--model m --tp-size 2 --nnodes 2 --dist-init tcp://a:1 --node-rank 1",
    ("worker", "with --node-rank 1 or more and without --health-port"):
        "--model m --tp-size 2 --nnodes 2 --dist-init tcp://a:1 --node-rank 1",
    ("worker", "with --simulate"): "--model m --simulate instant",
    ("worker", "without --tp-size, --dp-size or --step-dumps"): "--model m",
    ("worker", "without --nnodes or --dp-size"): "--model m --tp-size 2",
    ("worker", "with --dp-size 2 or more"): "--model m --dp-size 2 --dist-init tcp://a:1 --enable-expert-parallel",
    ("worker", "with kernels of a CPU"): "--model m --kernels cpu",
    ("worker", "with kernels of a GPU"): "--model m --kernels triton",
    ("worker", "with --kv-cache-memory"): "--model m --kv-cache-memory 1MiB",
    ("worker", "with --no-prefix-caching or --no-batch-invariant"): "--model m --no-prefix-caching",
    ("worker warmup", "with kernels of a CPU"): "--model m --kernels cpu",
    ("worker warmup", "with --kv-cache-memory"): "--model m --kv-cache-memory 1MiB",
    ("bench offline", "with kernels of a CPU"): "--model m --kernels cpu",
    ("bench offline", "with kernels of a GPU"): "--model m --kernels triton",
    ("bench offline", "with --kv-cache-memory"): "--model m --kv-cache-memory 1MiB",
    ("serve", "with --once"): "--once --no-ask",
    ("serve", "with --no-ask"): "--no-ask",
    ("serve", "with TLS or API keys"): "--api-keys keys",
    ("serve", "without --http-port"): "",
    ("serve", "without --audit and --audit-kv"): "--no-audit-kv",
    ("router", "without --admin-port"): "",
    ("router", "without --audit and --audit-kv"): "--no-audit-kv",
    ("generate", "with --offline"): "hello --offline m",
    ("generate", "with --json"): "hello --json",
    ("generate", "without --receipt"): "hello",
    ("generate", "with --text"): "hello --text",
    ("generate", "without --logprobs, --logprob-token-id or --prompt-logprobs"): "hello",
    ("generate", "without --prompt-logprobs"): "hello --logprobs 1",
    ("chat", "without --logprobs, --logprob-token-id or --prompt-logprobs"): "",
    ("chat", "without --prompt-logprobs"): "--logprobs 1",
    ("chat", "without --tool-command"): "",
    ("workers", "without --watch"): "",
    ("workers", "with --watch"): "--watch",
    ("routing", "without NAME=VALUE"): "",
}  # fmt: skip


def test_each_command_mode_has_selecting_arguments() -> None:
    modes = {
        (name, mode.name)
        for name, command in LEAVES.items()
        if isinstance(command, ModalCommand)
        for mode in command.modes
    }
    assert modes == ON.keys()


@pytest.mark.parametrize(("name", "mode"), ON)
def test_unused_option_is_refused_with_reason(name: str, mode: str) -> None:
    command = LEAVES[name]
    assert isinstance(command, ModalCommand)
    (wanted,) = [each for each in command.modes if each.name == mode]
    arguments = ON[name, mode].split()
    idle = [param for param in options_of(command) if wanted.has_no_use_for(param.name or "")]
    assert idle
    for param in idle:
        text = written(param)
        if wanted.holds.get(param.name or "", True) is False:
            text = [param.opts[0]]
        if set(text[:1]) & set(arguments) or param.name == "ask":
            text = ["--ask"] if mode == "with TLS or API keys" else ["--no-ask"]
        with pytest.raises(CommandError) as refused:
            parsed(command, [*arguments, *text])
        line = str(refused.value)
        assert refused.value.exit_code == 2
        assert line.endswith("; leave it out"), line
        assert any(line.startswith(f"{opt} has no effect ") for opt in (*param.opts, *param.secondary_opts)), line


@pytest.mark.parametrize("name", LEAVES)
def test_command_uses_each_parameter(name: str) -> None:
    """The command's function, and each decorator around it, reads every parameter that it takes."""
    function: Any = LEAVES[name].callback
    while function is not None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        (definition,) = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        taken = definition.args
        names = {each.arg for each in (*taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg) if each is not None}
        read = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name)}
        assert names - read == set(), f"{name}: {definition.name}"
        function = getattr(function, "__wrapped__", None)


RANKS = ON["worker", "with --node-rank 1 or more"].split()


def node_arguments(monkeypatch: pytest.MonkeyPatch, folder: Path, arguments: Sequence[str]) -> object:
    """The arguments of `run_node` for a command line, except those common to all processes."""
    from worker import server

    context = parsed(worker, ["--model", str(folder), *RANKS[2:], "--health-port", "0", *arguments])
    given = {key: value for key, value in context.params.items() if key != "log_level"}
    options = worker_options(**given)
    seen: list[object] = []

    async def run_node(*passed: Any) -> int:
        topology, model, threads, _, drain_timeout_s, health = passed
        seen.append((topology, model, threads, drain_timeout_s, health.address, health._wanted_port))
        return 0

    monkeypatch.setattr(server, "run_node", run_node)
    import asyncio

    asyncio.run(server.run_worker(options))
    return seen[0]


def test_rank_machine_uses_each_accepted_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, other = simulated_model(tmp_path / "a"), simulated_model(tmp_path / "b")
    secret = tmp_path / "secret"
    secret.write_text("known\n")
    mode = next(each for each in worker.modes if each.only is not None)
    changed = {
        "model": ["--model", str(other)],
        "tp_size": ["--tp-size", "4"],
        "nnodes": ["--tp-size", "6", "--nnodes", "3"],
        "node_rank": ["--tp-size", "6", "--nnodes", "3", "--node-rank", "2"],
        "dist_init": ["--dist-init", "tcp://b:2"],
        "dist_secret": ["--dist-secret", str(secret)],
        "threads": ["--threads", "7"],
        "drain_timeout": ["--drain-timeout", "3s"],
        "health_port": ["--health-port", "3"],
        "host": ["--host", "::1"],
    }
    assert mode.only is not None
    assert changed.keys() == mode.only - {"log_level"}
    plain = node_arguments(monkeypatch, folder, [])
    for name, arguments in changed.items():
        assert node_arguments(monkeypatch, folder, arguments) != plain, name


class Recorded(Config):
    """A Config that records the fields that the engine reads."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith(("worker.engine", "worker.simulation.", "worker.config.engine_config", "worker.kv_pool")):
            Recorded.read.add(name)
        return super().__getattribute__(name)


# The field of Config for each engine option with another name.
FIELD_OF = {
    "block_size": "kv_cache_block_size",
    "prefix_caching": "enable_prefix_caching",
    "graph_sizes": "compilation_config",
    "tp_size": "tensor_parallel_size",
    "dp_size": "parallel_config",
    "dp_rank": "parallel_config",
}
OF_THE_SERVICE = {field.name for field in fields(WorkerOptions)} | {
    "model_name", "drain_timeout", "step_timeout", "tls_cert", "tls_key", "tls_client_ca", "router_identities",
    "log_level", "simulate", "nnodes", "node_rank", "dist_init",
}  # fmt: skip


def test_simulated_engine_uses_each_accepted_option(tmp_path: Path) -> None:
    folder = simulated_model(tmp_path)
    mode = next(each for each in worker.modes if each.name == "with --simulate")
    params = parsed(worker, ["--model", str(folder), "--simulate", "instant"]).params
    options = worker_options(**{name: value for name, value in params.items() if name != "log_level"})
    config = Recorded(**{each.name: getattr(options.config, each.name) for each in fields(Config)})
    model_config = ModelConfig.from_folder(folder)
    Recorded.read.clear()
    built = build_engine(
        EngineOptions(with_special_tokens(config, model_config), model_config, simulate=options.simulate),
        StartProgress(),
    )
    built.core.add_request(EngineSequence([1, 2, 3], config.kv_cache_block_size, SamplingParams(max_tokens=4)))
    while built.core.has_unfinished():
        built.core.step()
    taken = {
        param.name or ""
        for param in options_of(worker)
        if not mode.has_no_use_for(param.name or "")
        and param.name not in OF_THE_SERVICE | {"tp_size", "dp_size", "dp_rank"}
    }
    assert {name for name in taken if FIELD_OF.get(name, name) not in Recorded.read} == set()


@pytest.mark.parametrize("size", ["--tp-size", "--dp-size"])
def test_simulation_refuses_ranks(size: str, tmp_path: Path) -> None:
    params = parsed(worker, ["--model", str(tmp_path), "--simulate", "instant", size, "2"]).params
    with pytest.raises(CommandError, match="--simulate runs no ranks"):
        worker_options(**{name: value for name, value in params.items() if name != "log_level"})


@pytest.mark.parametrize("method", ["mtp", "eagle3", "draft_model"])
def test_simulation_refuses_draft_models(method: str, tmp_path: Path) -> None:
    model = "" if method == "mtp" else ', "model": "d"'
    text = f'{{"method": "{method}", "num_speculative_tokens": 2{model}}}'
    params = parsed(worker, ["--model", "m", "--simulate", "instant", "--speculative-config", text]).params
    with pytest.raises(CommandError, match=f"no effect with --simulate and the method {method}"):
        worker_options(**{name: value for name, value in params.items() if name != "log_level"})


def test_unused_environment_variable_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and shells set variables for all commands, so a variable without effect is no error."""
    monkeypatch.setenv("FISSILE_WEIGHTS_CACHE", "/cache")
    monkeypatch.setenv("FISSILE_WORKER_PORT", "5")
    monkeypatch.setenv("FISSILE_WORKER_HEALTH_PORT", "6")
    assert unused_variables(parsed(worker, RANKS)) == ["FISSILE_WEIGHTS_CACHE", "FISSILE_WORKER_PORT"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--simulate instant --weights-cache off --no-constraints --kv-digests 0%",
        "--kernels cpu --batch-invariant",
        "--kernels triton --weights-cache off",
        "--no-prefix-caching --kv-digests 0%",
    ],
)
def test_option_value_equal_to_the_modes_is_accepted(arguments: str) -> None:
    assert parsed(worker, ["--model", "m", *arguments.split()]).params["model"] == "m"


def test_unused_file_option_is_refused_with_line(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("worker:\n  model: m\n  port: 5\n")
    with pytest.raises(CommandError, match=r"line 3: worker\.port has no effect with --node-rank 1 or more"):
        parsed(worker, [*RANKS, "--config", str(path)])


@pytest.mark.parametrize("command", ["models", "generate"])
def test_credentials_of_the_command_line_are_refused_in_plain_text(command: str) -> None:
    arguments = [*(["hello"] if command == "generate" else []), "--no-tls", "--tls-ca", "ca.pem"]
    context = parsed(LEAVES[command], arguments)
    with context, pytest.raises(CommandError, match="--tls-ca has no effect with --no-tls"):
        context.invoke(_callback(LEAVES[command]), **context.params)


def _callback(command: click.Command) -> Callable[..., Any]:
    assert command.callback is not None
    return command.callback


def test_unused_option_commands_match_entry_points() -> None:
    assert {name.split()[0] for name in LEAVES} == set(fissile.list_commands(click.Context(fissile))), COMMANDS


@pytest.mark.parametrize("name", LEAVES)
def test_empty_option_value_is_refused(name: str) -> None:
    """An empty value is usually an unset shell variable: `fissile serve --model "$MODEL"`."""
    command = LEAVES[name]
    taken = [param for param in options_of(command) if not param.is_flag]
    for param in taken:
        if (name, param.name) == ("health", "service"):
            continue
        with pytest.raises((click.BadParameter, CommandError)) as refused:
            parsed(command, [param.opts[0], ""])
        # `--config` too fails as a bad parameter, because click reads it with the other options.
        error = refused.value
        assert isinstance(error, click.BadParameter), error
        assert error.param is param


@pytest.mark.parametrize("command", ["flush", "cordon", "uncordon", "drain", "cancel", "keys new", "verify"])
def test_empty_argument_is_refused(command: str) -> None:
    """With an empty variable `fissile flush "$WORKER"` would flush all workers."""
    with pytest.raises(click.BadParameter, match="it is empty: give a value, or leave it out"):
        parsed(LEAVES[command], [""])


def test_empty_file_value_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text('router:\n  port: 0\n  placement: ""\n  host: ""\n')
    with pytest.raises(CommandError, match=r"line [34]: router\.(placement|host): "):
        parsed(LEAVES["router"], ["--config", str(path)])


def test_router_commands_take_address_and_router_options() -> None:
    callers = {name for name, command in LEAVES.items() if names_of(command) & {"--address", "--router"}}
    assert {"generate", "models", "health", "verify", "bench serve", "chat"} <= callers
    assert [name for name in callers if not {"--address", "--router"} <= names_of(LEAVES[name])] == []
