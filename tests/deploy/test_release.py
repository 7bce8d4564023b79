"""The release workflow, checked without a registry, and the install commands of the README."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import release_version
from tests.deploy.tools import DEPLOY, ROOT, run, tool

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text("utf-8"))["jobs"]
    return found


def steps(jobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in jobs.values() for step in job["steps"]]


def test_release_workflow_matches_workflow_schema() -> None:
    result = run([tool("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", WORKFLOW])
    assert result.returncode == 0, result.stdout + result.stderr


def test_release_workflow_passes_zizmor() -> None:
    result = run([tool("zizmor"), "--offline", "--persona=auditor", WORKFLOW])
    assert result.returncode == 0, result.stdout + result.stderr


def test_workflow_actions_are_pinned_by_commit(jobs: dict[str, Any]) -> None:
    used = [step["uses"] for step in steps(jobs) if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


def test_workflow_scripts_exist(jobs: dict[str, Any]) -> None:
    commands = " ".join(step.get("run", "") for step in steps(jobs))
    named = re.findall(r"scripts/[\w.]+", commands)
    assert {"scripts/wheel.sh", "scripts/sdist.sh", "scripts/check_wheel.sh", "scripts/sbom.sh"} <= set(named)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_workflow_builds_each_container_file(jobs: dict[str, Any]) -> None:
    built = jobs["images"]["strategy"]["matrix"]["image"]
    assert sorted(built) == sorted(path.stem for path in (DEPLOY / "docker").glob("*.Dockerfile"))


def test_release_tag_other_than_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert release_version.main([f"v{VERSION}"]) == 0
    assert release_version.main(["v9.9.9"]) == 1
    refused = capsys.readouterr().err
    assert "protos/pyproject.toml" in refused
    assert "deploy/kubernetes/base/fissile.yaml" in refused
    assert refused.count("deploy/helm/fissile/Chart.yaml") == 2


def test_tags_in_pages_exist() -> None:
    """A kustomization in a page must resolve today."""
    tags = run(["git", "tag"]).stdout.split()
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), DEPLOY / "README.md"):
        named = re.findall(r"\?ref=(v[\w.]+)", page.read_text("utf-8"))
        assert [tag for tag in named if tag not in tags] == [], page


def install_commands() -> list[str]:
    """The install commands of the README's section "Installing it", without comments."""
    section = (ROOT / "README.md").read_text("utf-8").partition("## Installing it")[2].partition("\n## ")[0]
    return [command.partition("#")[0].strip() for command in re.findall(r"^pip (install .*)$", section, re.MULTILINE)]


def test_readme_commands_install_router_and_client() -> None:
    commands = [shlex.split(command) for command in install_commands()]
    assert ["install", "./protos", ".[router,http]"] in commands
    assert ["install", "./protos"] in commands


def checkout(folder: Path) -> Path:
    """Copies the tracked files into `folder`, except tests, pages and manifests; returns `folder`."""
    for name in run(["git", "ls-files", "-z"]).stdout.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "deploy/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def pip(python: Path, *arguments: str | Path, cwd: Path, path: str) -> None:
    """Runs pip to its end; skips the test if pip reaches no registry.

    Args:
        python: the environment's interpreter.
        arguments: pip's arguments.
        cwd: pip's working folder.
        path: PATH of pip. Without a compiler on it the wheel has no kernels; another test covers them.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")}
    command = [str(python), "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**kept, "PATH": path}, capture_output=True, text=True, check=False)
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("a package registry is not reachable")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_source_archive_wheels_have_all_files(tmp_path: Path) -> None:
    source, tools = checkout(tmp_path / "src"), tmp_path / "src" / "build" / "wheel"
    (wanted,) = re.findall(r"\bbuild==[\d.]+", (ROOT / "scripts" / "wheel.sh").read_text("utf-8"))
    subprocess.run([sys.executable, "-m", "venv", tools], check=True)
    python, path = tools / "bin" / "python", str(tools / "bin")
    pip(python, "install", "--quiet", wanted, cwd=source, path=path)
    made = subprocess.run([source / "scripts" / "sdist.sh", "dist"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    archives = sorted((source / "dist").glob("*.tar.gz"))
    assert [file.name for file in archives] == [f"fissile-{VERSION}.tar.gz", f"fissile_client-{VERSION}.tar.gz"]
    pip(python, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, *archives, cwd=tmp_path, path=path)
    packed = {
        name
        for wheel in tmp_path.glob("*.whl")
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    tracked = set(run(["git", "ls-files", "common", "router", "worker", "kernels"]).stdout.split())
    stubs = set(run(["git", "-C", "protos", "ls-files", "fissile"]).stdout.split())
    assert tracked | stubs <= packed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_readme_install_from_checkout_runs_the_router(tmp_path: Path) -> None:
    source, bin_folder = checkout(tmp_path / "check out"), tmp_path / "venv" / "bin"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip(bin_folder / "python", "install", "--quiet", "./protos", ".[router,http]", cwd=source, path=str(bin_folder))
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**kept, "PATH": str(bin_folder)}

    def fissile(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [bin_folder / "fissile", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert fissile("version").stdout.split()[:2] == ["fissile", VERSION]
    assert "--worker TARGET" in fissile("router", "--help").stdout
    refused = fissile("worker", "--model", "nowhere")
    assert refused.returncode == 2
    assert "pip install" in refused.stderr
