"""The manifests of deploy/kubernetes as objects, rendered as `kubectl apply -k` would."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml

from common.cli.group import COMMANDS, find_entry_points
from tests.deploy.tools import DEPLOY, run

Object = dict[str, Any]
KUBERNETES = DEPLOY / "kubernetes"
VARIANTS = ("base", "rocm", "mtls")


@functools.cache
def rendered(variant: str) -> str:
    """The objects of a variant as YAML; skips the test where that takes kubectl and there is none."""
    if variant == "base":
        files = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"]
        return "\n---\n".join((KUBERNETES / "base" / name).read_text() for name in files)
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: it renders the variants of the manifests")
    result = run(["kubectl", "kustomize", KUBERNETES / variant])
    assert result.returncode == 0, result.stderr
    return result.stdout


@functools.cache
def _all_objects(variant: str) -> tuple[Object, ...]:
    return tuple(yaml.safe_load_all(rendered(variant)))


def objects(variant: str, kind: str) -> list[Object]:
    """The objects of a kind; not to be changed."""
    return [found for found in _all_objects(variant) if found["kind"] == kind]


def workload(variant: str, component: str) -> Object:
    """The Deployment of the routers or the StatefulSet of the workers."""
    kind = {"router": "Deployment", "worker": "StatefulSet"}[component]
    (found,) = objects(variant, kind)
    return found


def pod(variant: str, component: str) -> Object:
    """Its Pod: metadata and spec."""
    found: Object = workload(variant, component)["spec"]["template"]
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
    command: click.Command = find_entry_points(COMMANDS)[component].load()
    return command
