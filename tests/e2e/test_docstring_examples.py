"""The examples in docstrings of public classes run, against a service with the demo model."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fissile.client
import pytest

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.e2e.service import REPOSITORY, running_service
from worker.llm_engine import LLMEngine

CLIENT = (
    "Client",
    "Stream",
    "AsyncClient",
    "AsyncStream",
    "Connection",
    "Embeddings",
    "FissileError",
    "Receipt",
    "Result",
    "tool",
)
_FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def example(thing: Any) -> str:
    """The one example in the docstring of a class or function."""
    (code,) = _FENCE.findall(inspect.getdoc(thing) or "")
    return textwrap.dedent(code)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    demo = REPOSITORY / "deploy" / "demo" / "checkpoint"
    with running_service(tmp_path_factory.mktemp("service"), demo) as service:
        yield service.router.address


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENT)
def test_client_example_runs(name: str, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.sub(r"10\.0\.0\.\d:50051", address, example(getattr(fissile.client, name)))
    names = {"asyncio": asyncio, **{each: getattr(fissile.client, each) for each in fissile.client.__all__}}
    compiled = compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(compiled, names)
    if running is not None:
        asyncio.run(running)
    printed = capsys.readouterr().out
    assert printed.strip() or name == "tool"
    if name == "FissileError":
        assert printed == "INVALID_FIELD ['sampling_params.top_p']\n"
    if name == "Receipt":
        assert printed == "True\n"


@pytest.mark.slow
@pytest.mark.parametrize("thing", [SamplingParams, Config], ids=lambda thing: thing.__name__)
def test_engine_example_runs(thing: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(REPOSITORY / "deploy")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"SamplingParams": SamplingParams, "Config": Config, "LLMEngine": LLMEngine}
    exec(example(thing), names)
    if thing is SamplingParams:
        assert (names["greedy"].temperature, names["sampled"].seed) == (0.0, 7)
    else:
        assert names["engine"].config.max_num_seqs == 64
