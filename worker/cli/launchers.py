"""`--nnodes auto`: number of machines, this machine's number and machine 0, from the variables of a launcher.

Only `auto` reads them. Shells, images and jobs leak such variables into unrelated processes, and a worker for one
machine must not wait for a second one because of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import click
from click.core import ParameterSource

from common.cli.core.errors import CommandError
from common.params.options.types import AUTO_NODES

# Port of machine 0 where its ranks wait for the others. torchrun's MASTER_PORT may be taken by torchrun itself.
MEETING_PORT: Final = 4100
PLACEMENT_KEY: Final = "fissile.placement"
_HOST: Final = re.compile(r"(?:[^,\[\]]+|\[\d[\d,:-]*\])+(?=,|$)")
_NUMBERS: Final = re.compile(r"\[(\d+)[^\]]*\]")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts the command once on each machine, and the variables that it sets.

    Attributes:
        size: variable with the number of machines.
        rank: variable with the number of this machine, from 0.
        host: variable with the address of machine 0, or with Slurm's list of machines.
        tasks: variable with the number of processes that the launcher starts; "" for none.
        counts_all: True if `tasks` counts the processes of all machines, and `host` is a list.
        remedy: advice when a variable is missing or `tasks` shows several processes on a machine.
    """

    name: str
    size: str
    rank: str
    host: str
    tasks: str = ""
    counts_all: bool = False
    remedy: str = ""


# The innermost launcher first: torchrun also runs in Slurm's jobs and in Pods.
LAUNCHERS: Final = (
    Launcher(
        "torchrun", "GROUP_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "LOCAL_WORLD_SIZE",
        remedy="start one process on each machine, because a worker starts its ranks itself",
    ),
    Launcher(
        "Slurm", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", counts_all=True,
        remedy="start the worker with srun, one task on each machine, because a worker starts its ranks itself",
    ),
    Launcher(
        "LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS",
        remedy="LeaderWorkerSet 0.6 or newer sets all three in the Pods of a group",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """This machine among those of the model, as a launcher tells it.

    Attributes:
        source: the launcher and its variables, for the log.
    """

    nnodes: int
    node_rank: int
    host: str
    source: str

    @property
    def dist_init(self) -> str:
        """Address of machine 0 as `--dist-init` takes it; "" with one machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{MEETING_PORT}" if self.nnodes > 1 else ""


def node_placement(environment: Mapping[str, str]) -> NodePlacement:
    """Reads the variables of the innermost launcher.

    Raises:
        CommandError: no launcher has set variables, one is missing, or they contradict each other.
    """
    given = {name: value.strip() for name, value in environment.items() if value.strip()}
    # The address alone is no sign: MASTER_ADDR is often set for other programs.
    launcher = next((each for each in LAUNCHERS if each.size in given or each.rank in given), None)
    if launcher is None:
        names = "; ".join(f"{each.name}: {each.size}, {each.rank}, {each.host}" for each in LAUNCHERS)
        raise CommandError(f"--nnodes auto finds no variables of a launcher ({names}); give the number of machines")
    needed = (launcher.size, launcher.rank, launcher.host)
    for name in needed:
        if name not in given:
            others = " and ".join(each for each in needed if each in given)
            raise _refusal(launcher, f"{name} is not set beside {others}")
    size, rank = (_number(launcher, name, given[name]) for name in (launcher.size, launcher.rank))
    if not 0 <= rank < size:
        raise _refusal(launcher, f"{launcher.rank} is {rank}, and {launcher.size} is {size}")
    if launcher.tasks in given:
        tasks, wanted = _number(launcher, launcher.tasks, given[launcher.tasks]), size if launcher.counts_all else 1
        if tasks != wanted:
            raise _refusal(launcher, f"{launcher.tasks} is {tasks}, not {wanted}: several processes on a machine")
    host = given[launcher.host]
    if launcher.counts_all:
        host = first_host(host)
        if not host:
            raise _refusal(launcher, f"{launcher.host} is {given[launcher.host]!r}, not a list of machines")
    return NodePlacement(size, rank, host, f"{launcher.name} ({', '.join(needed)})")


def first_host(hosts: str) -> str:
    """First machine of a list in Slurm's notation: `n07` of `n[07-09,12],other`; "" if the list cannot be read."""
    match = _HOST.match(hosts)
    return "" if match is None else _NUMBERS.sub(r"\1", match[0])


def place_node(context: click.Context, environment: Mapping[str, str]) -> None:
    """Replaces `--nnodes auto` in the parameters of a command. `--node-rank` and `--dist-init` given by hand stay.

    Raises:
        CommandError: the launcher's variables are missing, or contradict each other.
    """
    params: dict[str, Any] = context.params
    if params.get("nnodes") != AUTO_NODES:
        return
    placement = node_placement(environment)
    found = {"nnodes": placement.nnodes, "node_rank": placement.node_rank, "dist_init": placement.dist_init}
    by_hand = [
        name
        for name in found
        if name != "nnodes" and context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
    ]
    params.update({name: value for name, value in found.items() if name not in by_hand})
    context.meta[PLACEMENT_KEY] = {"source": placement.source, **{name: params[name] for name in found}}


def _number(launcher: Launcher, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise _refusal(launcher, f"{name} is {text!r}, not a number")
    return int(text)


def _refusal(launcher: Launcher, problem: str) -> CommandError:
    return CommandError(f"--nnodes auto, {launcher.name}: {problem}; {launcher.remedy}")
