"""The `openai` package of the previous major version calls every endpoint, and reads what the current one reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import PINNED, version_of
from tests.e2e.facade_process import running_facade
from tests.e2e.http_bench import EXTRAS
from tests.e2e.service import REPOSITORY, running_service
from tests.peers.environment import peer_environment, peer_variables

pytestmark = pytest.mark.long

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
PROGRAM = REPOSITORY / "tests" / "peers" / "openai_endpoints.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """What the previous and the current version received."""
    folder = tmp_path_factory.mktemp("fissile")
    with running_service(folder, DEMO) as service, running_facade([service.router.address], folder) as facade:
        previous = peer_environment("openai-2", (PINNED["openai 2"],)) / "python"
        url = f"http://{facade.address}/v1"
        yield endpoints(previous, url), endpoints(Path(sys.executable), url)


def endpoints(python: Path, url: str) -> Any:
    command: list[str | Path] = [python, PROGRAM, url, "test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=peer_variables(), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def same(found: tuple[Any, Any], name: str) -> Any:
    """A trial's answer, which both clients of both versions received."""
    previous, current = found
    answers = [version[client][name] for version in (previous, current) for client in ("sync", "async")]
    assert answers == answers[:1] * 4
    return answers[0]


def both(found: tuple[Any, Any], name: str) -> Any:
    """A trial's whole answer, after checking the texts of its stream."""
    whole, (texts, _) = same(found, name), same(found, f"{name}, streamed")
    if "choices" in whole:
        for choice in whole["choices"]:
            message = choice.get("message") or {}
            calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
            assert texts[str(choice["index"])] == (choice.get("text") or message.get("content") or calls)
    return whole


@pytest.mark.client("openai 2", "every endpoint: only Fissile's own fields are unknown")
def test_versions_and_unknown_fields(found: tuple[Any, Any]) -> None:
    previous, current = found
    assert (previous["version"], current["version"]) == (version_of("openai 2"), version_of("openai"))
    # Anthropic's package reads the list of models too.
    lists = {f"{kind}Page[Model].{name}" for kind in ("Sync", "Async") for name in ("has_more", "first_id", "last_id")}
    # Of OpenAI; types of one version, or of both, lack them.
    known = {"ResponseFunctionCallArgumentsDoneEvent.name", "Response.store"}
    allowed = {".".join(extra) for extra in EXTRAS} | {"Response.fissile"} | lists | known
    assert {*current["unknown"]} - allowed == set()
    # Types of the previous version lack fields that OpenAI has added since.
    added = {"InputTokensDetails.cache_write_tokens"}
    assert {*previous["unknown"]} - allowed - added == set()


@pytest.mark.client(
    "openai 2", "chat completions with logprobs, tools and JSON Schema, whole and streamed, sync and async"
)
def test_chat_completions(found: tuple[Any, Any]) -> None:
    assert both(found, "chat")["choices"][0]["message"]["content"]
    assert len(both(found, "chat logprobs")["choices"][1]["logprobs"]["content"]) == 8
    assert both(found, "chat tools")["choices"][0]["finish_reason"] in ("tool_calls", "length")
    assert both(found, "chat schema")["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.client("openai 2", "completions with `echo` and logprobs, whole and streamed, sync and async")
def test_completions(found: tuple[Any, Any]) -> None:
    assert len(both(found, "completions")["choices"]) == 2
    assert both(found, "completions echo")["choices"][0]["text"].startswith("Once upon a time")


@pytest.mark.client("openai 2", "responses with tools, whole, streamed and by the helper, sync and async")
def test_responses(found: tuple[Any, Any]) -> None:
    for name in ("responses", "responses tools"):
        whole, (texts, last) = same(found, name), same(found, f"{name}, streamed")
        output = whole["output"][-1]
        assert "".join(texts.values()) == output.get("arguments", "") + "".join(
            part["text"] for item in whole["output"] for part in item.get("content") or ()
        )
        assert last["output"][-1] == output
    assert same(found, "responses helper") in ("response.completed", "response.incomplete")


@pytest.mark.client("openai 2", "embeddings and models, sync and async")
def test_embeddings_and_models(found: tuple[Any, Any]) -> None:
    vectors = same(found, "embeddings")["data"]
    assert vectors[0]["embedding"] == pytest.approx(same(found, "embeddings float")["data"][0]["embedding"])
    assert same(found, "models")["data"] == [same(found, "model")]


@pytest.mark.client("openai 2", "refused requests: error with `param`")
def test_refused_requests(found: tuple[Any, Any]) -> None:
    assert same(found, "bad value") == ["BadRequestError", "invalid_value", "top_p"]
    assert same(found, "unknown field") == ["BadRequestError", "unsupported_parameter", "horse"]
