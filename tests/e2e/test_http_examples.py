"""The examples for OpenAI's and Anthropic's packages, against a facade with a model that calls their tool."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from fissile.worker.v1 import worker_pb2 as wpb

from tests.e2e.fake_worker import FakeWorker
from tests.e2e.http_bench import facade_of
from tests.e2e.router_bench import bench
from tests.e2e.test_http_responses import DESCRIPTION, FILES, TOKENIZER
from tests.unit.router.support import EOS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Paris", "Rome")
)


def answer(submitted: wpb.SubmitSequence) -> list[int]:
    """Calls the tool twice, and answers when the prompt has both results."""
    prompt = TOKENIZER.decode(list(submitted.token_ids))
    said = "It is sunny in Paris." if "sunny" in prompt and "'Rome' is not known" in prompt else CALLS
    return [*TOKENIZER.encode(f"<think>\n</think>\n\n{said}"), EOS]


@pytest.mark.parametrize("name", ["messages_client.py", "responses_client.py"])
async def test_example_calls_its_tool_and_prints_the_answer(name: str) -> None:
    worker = FakeWorker(FILES, answer=answer, description=DESCRIPTION)
    async with bench(worker) as router, facade_of([router.router.server.address]) as http:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / name), "m", http.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(program.communicate(), 60)
        assert program.returncode == 0, err.decode()
        lines = out.decode().splitlines()
        assert [line.partition(" -> ")[2] for line in lines[1:3]] == ["sunny", "'Rome' is not known"]
        assert lines[3] == "It is sunny in Paris."
        await router.empty()
