"""The container files: what hadolint says, and that they start what there is, with variables that it knows."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

import click
import pytest

from common.cli.group import COMMANDS, find_entry_points
from common.params.options.clients import PROBE_TIMEOUT_S
from common.rpc.server import LIVENESS, READINESS
from tests.deploy.container_file import ContainerFile
from tests.deploy.tools import DEPLOY, ROOT, run, tool

FILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
# Of libraries and of Python itself; everything else must be an option's.
FOREIGN = {
    "AITER_JIT_DIR",
    "TRITON_CACHE_DIR",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "PATH",
    "HF_HOME",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "FISSILE_LOG_FORMAT",
}
BUILD_ONLY = {"PIP_DISABLE_PIP_VERSION_CHECK", "PIP_NO_CACHE_DIR", "PIP_BREAK_SYSTEM_PACKAGES"}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def options_of(command: str) -> dict[str, click.Option]:
    """The options of a `fissile` command by their environment variables."""
    loaded = find_entry_points(COMMANDS)[command].load()
    return {str(p.envvar): p for p in loaded.params if isinstance(p, click.Option)}


def ignored() -> list[str]:
    """What .dockerignore lets into the build context."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


def test_router_and_workers_have_spans() -> None:
    assert [path.stem for path in FILES] == ["router", "worker-cpu", "worker-cuda", "worker-rocm"]


@each_file
def test_hadolint_finds_nothing(path: Path) -> None:
    result = run([tool("hadolint"), "--failure-threshold", "style", path])
    assert (result.returncode, result.stdout) == (0, "")


@each_file
def test_base_images_have_a_version(path: Path) -> None:
    (base,) = [
        value.removeprefix("BASE=") for value in ContainerFile.read(path).all("ARG") if value.startswith("BASE=")
    ]
    assert re.fullmatch(r"docker\.io/[a-z/]+:[\w.]*\d[\w.-]*", base), base


@each_file
def test_image_command_uses_known_variables(path: Path) -> None:
    file = ContainerFile.read(path)
    program, command = file.command
    assert (program, command) == ("fissile", path.stem.partition("-")[0])
    known = options_of(command).keys() | options_of("health").keys() | FOREIGN | BUILD_ONLY
    assert file.environment.keys() - known == set()


@each_file
def test_container_ports_equal_command_defaults(path: Path) -> None:
    file = ContainerFile.read(path)
    command = file.command[1]
    port = {"router": "FISSILE_PORT", "worker": "FISSILE_WORKER_PORT"}[command]
    host = {"router": "FISSILE_HOST", "worker": "FISSILE_WORKER_HOST"}[command]
    assert file.all("EXPOSE") == [str(options_of(command)[port].default)]
    assert file.environment["FISSILE_ADDRESS"] == f"127.0.0.1:{options_of(command)[port].default}"
    assert file.environment[host] == "0.0.0.0"
    # A variable would win over the file of --config without a word.
    assert port not in file.environment


@each_file
def test_health_probes_name_existing_services(path: Path) -> None:
    file = ContainerFile.read(path)
    assert file.all("HEALTHCHECK")[0].endswith('CMD ["fissile", "health"]')
    assert file.environment["FISSILE_HEALTH_SERVICE"] in (LIVENESS, READINESS)
    timeout = re.search(r"--timeout=(\d+)s", file.all("HEALTHCHECK")[0])
    assert timeout is not None
    assert float(timeout[1]) > PROBE_TIMEOUT_S


@each_file
def test_image_runs_as_unprivileged_user(path: Path) -> None:
    user = ContainerFile.read(path).all("USER")[-1]
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)
    assert ContainerFile.read(path).all("STOPSIGNAL") == ["SIGTERM"]


@each_file
def test_copied_files_exist_and_are_not_ignored(path: Path) -> None:
    copied = list(ContainerFile.read(path).copied())
    assert {"pyproject.toml", "hatch_build.py", "common", "router", "worker", "kernels", "protos"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source in ignored()


def test_installed_extras_exist() -> None:
    installed = {path.stem: re.findall(r'"\.\[([a-z,]+)\]"', path.read_text()) for path in FILES}
    assert installed == {
        "router": ["router,http"],
        "worker-cpu": ["worker,smg,redis,mooncake,cpu"],
        "worker-cuda": ["worker,smg,redis,mooncake,triton"],
        "worker-rocm": ["worker,smg,redis,mooncake"],
    }
    # The pattern by which the files for CPUs and CUDA find the version of PyTorch.
    pinned = re.search(r'^cpu = \["(torch==[^"]+\+cpu)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert pinned is not None


@pytest.mark.slow
def test_wheel_from_copied_files_is_complete(tmp_path: Path) -> None:
    """The container files copy parts of the checkout: a package that pyproject.toml names must not be missing."""
    context = tmp_path / "src"
    for source in ContainerFile.read(FILES[0]).copied():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, context / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            context.mkdir(exist_ok=True)
            shutil.copy(ROOT / source, context)
    made = run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            tmp_path,
            context / "protos",
            context,
        ]
    )
    assert made.returncode == 0, made.stderr
    names, client = (contents(tmp_path, pattern) for pattern in ("fissile-*.whl", "fissile_client-*.whl"))
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {
        "common", "facade", "kernels", "router", "worker",
    }  # fmt: skip
    assert {name.partition("/")[0] for name in client if ".dist-info/" not in name} == {"fissile"}
    ours = {
        path for name in ("common", "facade", "router", "worker", "kernels") for path in (ROOT / name).rglob("*.py")
    }
    assert {str(path.relative_to(ROOT)) for path in ours} <= names
    stubs = (ROOT / "protos").rglob("*.py")
    assert {str(path.relative_to(ROOT / "protos")) for path in stubs} <= client
    for group in (COMMANDS, "fissile.offline"):
        for entry in find_entry_points(group).values():
            assert f"{entry.module.replace('.', '/')}.py" in names


def contents(folder: Path, pattern: str) -> set[str]:
    """Files in the wheel of that name."""
    (wheel,) = folder.glob(pattern)
    return set(zipfile.ZipFile(wheel).namelist())


def test_service_and_client_packages_have_one_version() -> None:
    """The service requires the client package of its own version, and both support the same Pythons."""
    service, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"] for folder in (".", "protos")
    )
    assert service["version"] == client["version"]
    assert f"fissile-client=={client['version']}" in service["dependencies"]
    assert {re.split("[<>=]", each)[0] for each in client["dependencies"]} == {
        "grpcio", "protobuf", "googleapis-common-protos",
    }  # fmt: skip
    assert service["requires-python"] == client["requires-python"]
