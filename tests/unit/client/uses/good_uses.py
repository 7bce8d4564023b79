"""Correct calls of the client library. Type checkers report no errors."""

from __future__ import annotations

from typing import Any

from fissile.client import AsyncClient, Client, Delta, Embeddings, Result, tool
from fissile.v1 import inference_pb2 as pb


def ask(client: Client) -> Result:
    client.chat("hi", temperature=1, top_k=None, seed=7, max_tokens=20, logprobs=3, timeout_s=None, receipt=True)
    client.chat([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], stop_strings=["."], priority="high")
    client.chat([pb.ChatMessage(role="user", content="hi")], priority=pb.PRIORITY_LOW, n=2)
    client.chat("hi", tools=[tool("f", "does", {"type": "object"})], tool_choice={"mode": "required"})
    client.chat("hi", template_arguments_json={"enable_thinking": False}, reasoning={"max_tokens": 100})
    client.chat("hi", constraint={"json_schema": {"type": "object"}}, metadata=[("traceparent", "00-1-2-01")])
    client.generate([1, 2, 3], logit_bias={5: -1.0}, output_options={"echo": True}, receipt={"logits_every": 4})
    client.generate("hi", constraint=pb.Constraint(regex="a+"), sampling_params=pb.SamplingParams(temperature=0))
    further: dict[str, Any] = {"temperature": 0.5}
    return client.chat("hi", **further)


def embed(client: Client) -> Embeddings:
    vectors = client.embed(["a", [1, 2]], dimensions=8, pooling="mean")
    first: list[float] = vectors[0]
    size: int = vectors.size + len(first) + len(vectors)
    client.rerank("q", ["d"], top_n=size)
    client.score([" a"], "b", return_tokens=True)
    return vectors


async def stream() -> str:
    async with AsyncClient("127.0.0.1:50051", api_key="k", give_up_s=1) as client:
        return "".join([event.text async for event in client.chat_stream("hi") if isinstance(event, Delta)])
