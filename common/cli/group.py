"""The click group behind `fissile`: subcommands found by entry points and imported only when they are asked for.

`fissile version` and `fissile --help` import neither the router nor the worker, so they are quick and need no extra.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click

from common.cli.core.errors import CommandError
from common.version import fissile_version

COMMANDS = "fissile.commands"
OFFLINE = "fissile.offline"
CHECKOUT = Path(__file__).resolve().parents[2]

# Name -> one line for the list of commands. Kept here, so that the list imports no command.
SUMMARIES = {
    "serve": "Serve a model on this machine: one router and its workers.",
    "pull": "Download a model from the Hugging Face Hub.",
    "list": "List the downloaded models, and whether they can be served.",
    "rm": "Remove downloaded models.",
    "generate": "Ask a running router, or a checkpoint folder with --offline.",
    "chat": "Talk to a model of a running router.",
    "embed": "Turn texts into vectors, by a model of a running router.",
    "rerank": "Order documents by their relevance to a query.",
    "score": "Say how likely texts are behind a context.",
    "verify": "Run a finished request again and compare it with its receipt.",
    "bench": "Measure a running router, or a checkpoint folder by itself.",
    "models": "List the models that a running router serves.",
    "workers": "List the workers of a running router, with their load.",
    "top": "Watch workers, tenants and requests of a running router.",
    "cordon": "Stop new work on a worker, which keeps running.",
    "uncordon": "Let a cordoned worker take new work again.",
    "drain": "Drain a worker and shut it down.",
    "flush": "Drop the prefix caches of workers.",
    "routing": "Show or change how a router admits and places requests.",
    "reload": "Let a running router read its configuration again.",
    "requests": "List the requests in flight at a running router.",
    "steps": "Show the newest steps of a worker, with batches and times.",
    "cancel": "End a request in flight at a running router.",
    "info": "Show version, start and options of a running router.",
    "keys": "Make API keys for the callers of a router.",
    "health": "Check the health of a router or worker (exit code 0 or 1).",
    "config": "Show the options in force, and where each value comes from.",
    "router": "Run one router: the public API in front of the workers.",
    "replay-step": "Compute a recorded step again under a profiler.",
    "worker": "Run one worker: an engine with its model.",
    "http": "Run one HTTP facade: APIs of OpenAI and Anthropic.",
    "version": "Print the versions of Fissile and its dependencies.",
}

# Arguments of `pip install` in a checkout. They name the client's folder, so that pip asks no package index for it.
_ROUTER = "./protos '.[router]'"
_HTTP = "./protos '.[http]'"
_SMG = "./protos '.[smg]'"
_WORKER = "--extra-index-url https://download.pytorch.org/whl/cpu ./protos '.[router,worker,cpu]'"
# Top-level module that may be missing -> the arguments that install it.
INSTALLED_BY = {
    "torch": _WORKER,
    "safetensors": _WORKER,
    "huggingface_hub": _WORKER,
    "msgpack": _WORKER,
    "transformers": _ROUTER,
    "tokenizers": _ROUTER,
    "jinja2": _ROUTER,
    "regex": _ROUTER,
    "dns": _ROUTER,
    "starlette": _HTTP,
    "uvicorn": _HTTP,
    "msgspec": _HTTP,
    "smg_grpc_proto": _SMG,
}


def find_entry_points(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name: those that are installed, and of a checkout those of its pyproject.toml.

    What an editable install knows of them is as old as the install.
    """
    found = {entry.name: entry for entry in entry_points(group=group)}
    project = CHECKOUT / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][group]
        found |= {name: EntryPoint(name, value, group) for name, value in table.items()}
    return found


def missing_extra(command: str, module: str) -> CommandError:
    """Error for a part of Fissile that is not installed; names the command that installs it in a checkout."""
    return CommandError(
        f"`fissile {command}` needs {module}, which is not installed here. In a checkout of Fissile: "
        f"pip install {INSTALLED_BY[module]} (or make setup)"
    )


@contextlib.contextmanager
def naming_missing_extra(command: str) -> Iterator[None]:
    """Converts the failed import of a part of an extra to a one-line error."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in INSTALLED_BY:
            raise
        raise missing_extra(command, module) from error


class SuggestingGroup(click.Group):
    """A group that suggests similar commands for an unknown name, as click does for options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command of `args` as click does; the error for an unknown name has suggestions.

        Raises:
            UsageError: the group has no such command.
        """
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), 3)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{meant}", ctx)
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """A group whose commands are the entry points of `fissile.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, those of `SUMMARIES` first and in that order."""
        found = find_entry_points(COMMANDS)
        return [name for name in SUMMARIES if name in found] + sorted(found.keys() - SUMMARIES.keys())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports one command; None for an unknown name."""
        entry = find_entry_points(COMMANDS).get(cmd_name)
        if entry is None:
            return None
        with naming_missing_extra(cmd_name):
            command: click.Command = entry.load()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUMMARIES.get(name, "")) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; a missing extra that it imports late is named too."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError:
            with naming_missing_extra(ctx.invoked_subcommand or ""):
                raise


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"fissile {fissile_version()}")
        context.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Print the version; `fissile version` prints those of the dependencies too.",
)  # fmt: skip
def fissile() -> None:
    """Serves large language models over gRPC: one request, one answer.

    Every option can be set by an environment variable too; `fissile COMMAND --help` names them.
    """


def run() -> int:
    """Runs the command line. Returns the exit code: 0, 1 (failed), 2 (something to change), or the command's own."""
    add_stubs_to_path()
    # gRPC's own lines on standard error repeat what arrives as a status or an exception (a taken port, a lost peer).
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    _never_fail_on_characters()
    try:
        code = fissile.main(prog_name="fissile", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "fissile"
        return _refuse(f"{error.format_message()} (`{command} --help` lists what there is)", error.exit_code)
    except CommandError as error:
        return _refuse(str(error), error.exit_code)
    except click.ClickException as error:
        return _refuse(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # Our reader has ended (`fissile generate ... | head`). The exit must not try to flush into the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def add_stubs_to_path() -> None:
    """Makes `import fissile` work in a plain checkout, where nothing is installed."""
    stubs = CHECKOUT / "protos"
    if stubs.is_dir() and str(stubs) not in sys.path:
        sys.path.append(str(stubs))


def _never_fail_on_characters() -> None:
    """Replaces characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _refuse(message: str, exit_code: int) -> int:
    line = " ".join("".join(each if each.isprintable() else " " for each in message).split())
    # Standard error may be closed; the exit code still tells the failure.
    with contextlib.suppress(OSError):
        click.echo(f"error: {line if len(line) < 4_000 else f'{line[:2_000]} ... {line[-1_900:]}'}", err=True)
    return exit_code
