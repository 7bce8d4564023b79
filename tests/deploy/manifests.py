"""The objects of the Helm chart, as `helm template` renders its value sets, and of deploy/kubernetes."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml

from common.cli.group import COMMANDS, find_entry_points
from tests.deploy.tools import DEPLOY, run, tool

Object = dict[str, Any]
CHART = DEPLOY / "helm" / "fissile"
# What `kubectl apply -k` needs no helm for: the chart with its defaults.
PLAIN = DEPLOY / "kubernetes" / "base" / "fissile.yaml"
COMMAND_OF = {"router": "router", "worker": "worker", "facade": "http"}


def _values(path: Path) -> Object:
    values: Object = yaml.safe_load(path.read_text("utf-8"))
    return values


def _enabled() -> dict[str, tuple[str, ...]]:
    """The components of each value set."""
    defaults, found = _values(CHART / "values.yaml"), {}
    for path in sorted((CHART / "ci").glob("*.yaml")):
        own = _values(path)
        switches = {name: {**defaults[name], **own.get(name, {})}["enabled"] for name in COMMAND_OF}
        found[path.stem] = tuple(name for name, enabled in switches.items() if enabled)
    return found


COMPONENTS_OF = _enabled()
VARIANTS = tuple(COMPONENTS_OF)


def template(*arguments: str | Path, release: str = "fissile") -> subprocess.CompletedProcess[str]:
    """Runs `helm template`; skips the test where there is no helm."""
    return run([tool("helm"), "template", release, CHART, "--namespace", "llm", *arguments])


@functools.cache
def rendered(variant: str) -> str:
    """The objects of a value set as YAML. Those of the defaults are there without helm."""
    if variant == "base":
        return PLAIN.read_text("utf-8")
    result = template("-f", CHART / "ci" / f"{variant}.yaml")
    assert result.returncode == 0, result.stderr
    return result.stdout


@functools.cache
def all_objects(variant: str) -> tuple[Object, ...]:
    """The objects of a value set; not to be changed."""
    return tuple(found for found in yaml.safe_load_all(rendered(variant)) if found is not None)


def objects(variant: str, kind: str) -> list[Object]:
    """The objects of a kind; not to be changed."""
    return [found for found in all_objects(variant) if found["kind"] == kind]


def workload(variant: str, component: str) -> Object:
    """The Deployment, StatefulSet or LeaderWorkerSet of a component; of ranks, that of their worker."""
    component = "worker" if component == "rank" else component
    kinds = ("StatefulSet", "LeaderWorkerSet") if component == "worker" else ("Deployment",)
    found = [o for kind in kinds for o in objects(variant, kind) if o["metadata"]["name"] == f"fissile-{component}"]
    assert len(found) == 1
    return found[0]


def pod(variant: str, component: str) -> Object:
    """Its Pod: metadata and spec. Of a group, that of the leader; `rank` is that of the others."""
    spec = workload(variant, component)["spec"]
    group = spec.get("leaderWorkerTemplate")
    if group is None:
        made: Object = spec["template"]
        return made
    found: Object = group["workerTemplate" if component == "rank" else "leaderTemplate"]
    return found


def container(variant: str, component: str) -> Object:
    (found,) = pod(variant, component)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(variant: str, component: str) -> dict[str, str]:
    """The variables that have a value in the manifest."""
    return {entry["name"]: entry["value"] for entry in container(variant, component)["env"] if "value" in entry}


def probes(variant: str, component: str) -> Iterator[Object]:
    """Startup, readiness and liveness."""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield container(variant, component)[name]


def command_of(component: str) -> click.Command:
    """What its container runs."""
    command: click.Command = find_entry_points(COMMANDS)[COMMAND_OF.get(component, component)].load()
    return command
