"""`fissile generate --receipt` and `fissile verify` at a router: what they say, and their exit codes."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fissile.worker.v1 import worker_pb2 as wpb

from common.cli.client.generate import generate
from common.cli.client.verify import verify
from common.cli.core.errors import CommandError
from tests.e2e.fake_worker import FakeWorker, letters
from tests.e2e.router_bench import FILES, bench

LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d ")


async def run(command: Any, b: Any, *arguments: object) -> Result:
    """Runs a command against the router of `b`, on another thread."""
    given = [*map(str, arguments), "--address", b.router.server.address]
    return await asyncio.to_thread(CliRunner().invoke, command, given)


def said(done: Result) -> str:
    """Output of a command, without the log lines of the router in this process."""
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not LOG_LINE.match(line))


async def write_receipt(b: Any, path: Path, *arguments: str) -> dict[str, Any]:
    """A file of `fissile generate`, and its content."""
    done = await run(generate, b, "say", "--max-tokens", "9", "--request-id", "r", "--receipt", path, *arguments)
    assert done.exit_code == 0, done.output
    # It has the prompt and the answer.
    assert path.stat().st_mode & 0o777 == 0o600  # noqa: ASYNC240
    written: dict[str, Any] = json.loads(path.read_text())  # noqa: ASYNC240
    return written


@pytest.mark.parametrize("how", ["--chat", "--text"])
async def test_verify_needs_only_written_receipt_file(how: str, tmp_path: Path) -> None:
    async with bench(FakeWorker(FILES, worker_id="w0"), FakeWorker(FILES, worker_id="w1")) as b:
        written = await write_receipt(b, tmp_path / "receipt.json", how, "--logits-every", "4")
        assert len(written["receipt"]["logit_digests"]) == 3
        for worker in ("w0", "w1"):
            done = await run(verify, b, tmp_path / "receipt.json", "--worker", worker)
            assert (done.exit_code, said(done)) == (0, f"equal: all 9 tokens are the same on worker {worker}\n")
        done = await run(verify, b, tmp_path / "receipt.json", "--json")
        assert json.loads(said(done))["verdict"] == "equal"
        await b.empty()


async def test_bare_receipt_is_verified_with_request_file(tmp_path: Path) -> None:
    async with bench(FakeWorker(FILES)) as b:
        proof = await write_receipt(b, tmp_path / "proof.json", "--text")
        alone, asked = tmp_path / "receipt.json", tmp_path / "request.json"
        alone.write_text(json.dumps(proof["receipt"]))
        with pytest.raises(CommandError, match="--request"):
            raise (await run(verify, b, alone)).exception or AssertionError
        asked.write_text(json.dumps(proof["generate"]))
        assert (await run(verify, b, alone, "--request", asked)).exit_code == 0
        proof["generate"]["text"] = "ask"
        asked.write_text(json.dumps(proof["generate"]))
        done = await run(verify, b, alone, "--request", asked)
        assert done.exit_code == 2
        assert said(done).startswith("this is not the request of the receipt: ")


async def test_wrong_altered_and_forged_answers_are_distinguished(tmp_path: Path) -> None:
    worker = FakeWorker(FILES)
    path = tmp_path / "receipt.json"
    async with bench(worker) as b:
        proof = await write_receipt(b, path, "--text")
        right = letters(wpb.SubmitSequence())
        worker.answer = lambda _: [*right[:6], right[6] + 1, *right[7:]]
        done = await run(verify, b, path)
        assert done.exit_code == 1
        assert said(done).startswith("another token was chosen: generated token 6 was ")
        worker.submitted.clear()
        altered = {**proof, "token_ids": {"ids": [*proof["token_ids"]["ids"][:-1], 1]}}
        path.write_text(json.dumps(altered))
        with pytest.raises(CommandError, match="the answer was altered"):
            raise (await run(verify, b, path)).exception or AssertionError
        forged = {**proof["receipt"], "output_sha256": base64.b64encode(bytes(32)).decode()}
        path.write_text(json.dumps({**proof, "receipt": forged}))
        done = await run(verify, b, path)
        assert (done.exit_code, "the receipt was altered" in said(done)) == (2, True)
        assert not worker.submitted


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"receipt": 3}', '{"receipt": {"version": "x"}}', '{"nonsense": 1}']
)
async def test_file_without_receipt_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(content)
    done = CliRunner().invoke(verify, [str(path)])
    assert isinstance(done.exception, CommandError)
    assert str(path) in str(done.exception)
    assert done.exception.exit_code == 2
