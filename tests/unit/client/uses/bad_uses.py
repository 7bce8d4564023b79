"""Calls of the client library with mistakes. Type checkers report the lines marked "wrong", and no others."""

from __future__ import annotations

from fissile.client import AsyncClient, Client


def ask(client: Client) -> None:
    client.chat("hi", temprature=1)  # wrong
    client.chat("hi", temperature="hot")  # wrong
    client.chat("hi", max_tokens=1.5)  # wrong
    client.chat("hi", max_token=1)  # wrong
    client.chat("hi", priority="urgent")  # wrong
    client.chat("hi", constraint={"regexp": "a"})  # wrong
    client.chat("hi", logit_bias={"5": 1.0})  # wrong
    client.chat("hi", timeout_s="5")  # wrong
    client.chat_stream(5)  # wrong
    client.generate("hi", tools=[])  # wrong
    client.generate(None)  # wrong
    client.embed(["a"], dimension=5)  # wrong
    client.rerank("q", ["d"], top_n="1")  # wrong
    client.score([" a"], return_token=True)  # wrong
    client.verify(None)  # wrong
    print(client.chat("hi").txt)  # wrong
    Client("a:1", apikey="k")  # wrong


async def wait(client: AsyncClient) -> None:
    await client.chat("hi", temprature=1)  # wrong
    await client.generate("hi", seed="7")  # wrong
