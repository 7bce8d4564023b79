"""`fissile embed`, `rerank` and `score` at a router: the numbers of the RPCs, in calls that fit; what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from fissile.v1 import inference_pb2 as pb

from common.cli.client.embed import embed
from common.cli.client.rerank import rerank
from common.cli.client.score import score
from common.cli.core.errors import CommandError
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Service, free_port, running_service
from tests.e2e.test_command_line import ROOT, fissile

SAID = ["the cat sat", "a", "the cat sat on the mat"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": 40, "false_token_id": 41}))
    options = ["--prefix-caching", "--max-model-len", "256"]
    with running_service(tmp_path_factory.mktemp("service"), folder, worker_options=options) as service:
        yield service


def run(command: Any, service: Service, *arguments: str, text: str | None = None) -> Result:
    done = CliRunner().invoke(command, [*arguments, "--address", service.router.address], input=text)
    assert done.exception is None, done.exception
    return done


def refused(command: Any, address: str, *arguments: str, text: str | None = None) -> CommandError:
    error = CliRunner().invoke(command, [*arguments, "--address", address], input=text).exception
    assert isinstance(error, CommandError), error
    return error


def vectors(service: Service, **fields: Any) -> list[list[float]]:
    inputs = [pb.TextOrTokens(text=text) for text in SAID]
    answer = service.stub.Embed(pb.EmbedRequest(inputs=inputs, **fields), timeout=60)
    return [list(embedding.values) for embedding in answer.embeddings]


def in_calls_of(monkeypatch: pytest.MonkeyPatch, command: str, limit: str, count: int) -> None:
    monkeypatch.setattr(f"common.cli.client.{command}.{limit}", count)


def test_vectors_are_lines_in_the_order_of_the_texts(service: Service) -> None:
    done = run(embed, service, *SAID, "--priority", "low", "--model", "test")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    expected = np.array(vectors(service), np.float32)
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), expected)
    # As short as float32 allows.
    assert max(len(repr(number)) for number in lines[0]["embedding"]) <= 16
    assert done.stderr.startswith("3 vectors of 64 numbers (last), ")


def test_vectors_match_requested_options(service: Service) -> None:
    options = ("--pooling", "mean", "--no-normalize", "--dimensions", "5")
    expected = vectors(service, pooling=pb.POOLING_MEAN, normalize=False, dimensions=5)
    whole = json.loads(run(embed, service, *options, "--format", "json", text="\n".join(SAID)).stdout)
    assert np.array_equal(np.array(whole["embeddings"], np.float32), np.array(expected, np.float32))
    assert (whole["pooling"], whole["usage"]["completion_tokens"]) == ("POOLING_MEAN", 0)
    assert whole["weights_digest"]
    done = run(embed, service, *options, "--format", "npy", "--file", "-", text="\n".join(SAID))
    assert np.array_equal(np.load(io.BytesIO(done.stdout_bytes)), np.array(expected, np.float32))


def test_any_number_of_texts_is_embedded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    in_calls_of(monkeypatch, "embed", "MAX_EMBED_NUMBERS", 2 * 64)
    done = run(embed, service, *SAID, *SAID)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["index"] for line in lines] == list(range(6))
    assert np.array_equal(np.array([line["embedding"] for line in lines], np.float32), 2 * vectors(service))
    tokens = sum(len(service.stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids) for text in SAID)
    assert f"6 vectors of 64 numbers (last), {2 * tokens} tokens" in done.stderr
    # Named by its place among all.
    error = refused(embed, service.router.address, *SAID, *SAID, "x y " * 300)
    assert (error.exit_code, str(error).startswith("OUT_OF_RANGE: inputs[6].text ")) == (2, True)


def test_documents_are_ordered(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["a cat\nsat", "two dogs", "the mat", "two dogs", "nothing"]
    answer = service.stub.Rerank(pb.RerankRequest(query="cats?", documents=documents, instruction="Find."), timeout=60)
    expected = [(one.index, one.relevance) for one in answer.documents]
    lines = "".join(f"{json.dumps(document)}\n" for document in documents)
    for count in (1024, 2):
        in_calls_of(monkeypatch, "rerank", "MAX_DOCUMENTS", count)
        options = ("--instruction", "Find.", "--json-lines", "--json")
        ranked = json.loads(run(rerank, service, "cats?", *options, text=lines).stdout)
        found = [(one["index"], float(np.float32(one["relevance"]))) for one in ranked["documents"]]
        assert found == expected
        assert [one["document"] for one in ranked["documents"]] == [documents[place] for place, _ in expected]
        assert ranked["usage"]["prompt_tokens"] == answer.usage.prompt_tokens
    done = run(rerank, service, "cats?", *documents, "--instruction", "Find.", "--top", "2")
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert rows[0] == ["RELEVANCE", "INDEX", "DOCUMENT"]
    assert [row[1:] for row in rows[1:]] == [[str(i), json.dumps(documents[i])] for i, _ in expected[:2]]
    assert done.stderr.startswith("5 documents, ")


def test_continuations_are_scored(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [pb.TextOrTokens(text=text) for text in (" mat", " cat sat", " dogs")]
    asked = pb.ScoreRequest(context=pb.TextOrTokens(text="the cat sat on the"), continuations=texts)
    expected = service.stub.Score(asked, timeout=60)
    given = ("--context", "the cat sat on the", *(text.text for text in texts))
    for count in (128, 2):
        in_calls_of(monkeypatch, "score", "MAX_CONTINUATIONS", count)
        scored = json.loads(run(score, service, *given, "--json", "--tokens").stdout)
        assert [(one["logprob"], one["greedy"], one["tokens"]) for one in scored["scores"]] == [
            (one.logprob, one.greedy, one.tokens) for one in expected.scores
        ]
        assert [len(one["logprobs"]) for one in scored["scores"]] == [one.tokens for one in expected.scores]
        assert scored["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    done = run(score, service, *given, "--tokens")
    first, *_ = (line.split(maxsplit=4) for line in done.stdout.splitlines()[1:])
    best = expected.scores[0]
    mean = f"{best.logprob / best.tokens:.4f}"
    assert first == [f"{best.logprob:.4f}", mean, str(best.tokens), "no" if not best.greedy else "yes", '" mat"']
    assert done.stdout.count("\n") == 1 + 3 + 2 + sum(one.tokens for one in expected.scores)
    whole = service.stub.Score(pb.ScoreRequest(continuations=texts[:1]), timeout=60)
    rolling = json.loads(run(score, service, " mat", "--json").stdout)
    assert rolling["scores"][0]["logprob"] == whole.scores[0].logprob


def test_refused_field_is_named(service: Service) -> None:
    here = service.router.address
    error = refused(embed, here, "a", "--dimensions", "65")
    assert str(error).startswith("INVALID_ARGUMENT: dimensions is 65")
    error = refused(score, here, "a", "--model", "other")
    assert (error.exit_code, "NOT_FOUND" in str(error)) == (2, True)
    nowhere = f"127.0.0.1:{free_port()}"
    for command, arguments in ((embed, ["a"]), (score, ["a"]), (rerank, ["a", "b"])):
        error = refused(command, nowhere, *arguments)
        assert (error.exit_code, str(error).startswith(f"no router can be reached at {nowhere}")) == (3, True)


def test_client_calls_other_router_after_loss(service: Service) -> None:
    both = f"127.0.0.1:{free_port()},{service.router.address}"
    done = CliRunner().invoke(embed, ["a cat", "--router", both])
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1), done.output


def test_text_commands_run_as_programs(service: Service) -> None:
    """The commands run as processes: with a file, with a pipe, and with one line that names the error."""
    done = fissile("embed", "--address", service.router.address, "--dimensions", "2", text="a\nb\n")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    done = fissile("rerank", "--address", service.router.address, "query", text="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no documents: standard input is empty (`fissile rerank --help` lists what there is)\n"


def test_npy_format_is_refused_on_terminal() -> None:
    terminal, output = os.openpty()
    command = [sys.executable, "-m", "common.cli.main", "embed", "a", "--format", "npy"]
    done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    os.close(output)
    os.close(terminal)
    assert done.returncode == 2
    assert "send standard output to a file" in done.stderr


def test_vectors_before_bad_text_are_printed(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the input ends early, the vectors so far are there."""
    in_calls_of(monkeypatch, "embed", "MAX_EMBED_INPUTS", 2)
    path = tmp_path / "corpus"
    path.write_text("a\nb\n" + "x y " * 300)
    done = CliRunner().invoke(embed, ["--file", str(path), "--address", service.router.address])
    assert "inputs[2].text" in str(done.exception)
    assert len(done.stdout.splitlines()) == 2
