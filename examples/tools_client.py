"""Lets a model use a tool: `python examples/tools_client.py [HOST:PORT ...]`, with a model that knows tools.

The model is asked, its calls are answered, and it goes on with the results, until it calls nothing more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from fissile.client import Client, Delta, FissileError, tool
from fissile.v1.inference_pb2 import ChatMessage, ToolCall

MOST_ROUNDS = 4
LENGTHS = {"Rhine": 1230, "Danube": 2850}
TOOLS = [
    tool(
        "river_length",
        "Length of a river in kilometres.",
        {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
    )
]


def river_length(river: str = "", **_: Any) -> str:
    """Length of a river, or that it is not known."""
    return json.dumps({"km": LENGTHS[river]} if river in LENGTHS else {"error": f"{river!r} is not known"})


FUNCTIONS: dict[str, Callable[..., str]] = {"river_length": river_length}


def result_of(call: ToolCall) -> ChatMessage:
    """The message that answers a call; a model may call what there is not, with what is no JSON."""
    try:
        result = FUNCTIONS[call.name](**json.loads(call.arguments_json))
    except (KeyError, TypeError, ValueError) as error:
        result = json.dumps({"error": f"{type(error).__name__}: {error}"})
    return ChatMessage(role="tool", tool_call_id=call.id, name=call.name, content=result)


def main(routers: list[str]) -> int:
    """Prints the conversation; 1 if a call of the service fails."""
    messages = [ChatMessage(role="user", content="Which is longer, the Rhine or the Danube?")]
    try:
        with Client(routers) as client:
            for _ in range(MOST_ROUNDS):
                stream = client.chat_stream(messages, tools=TOOLS, temperature=0, max_tokens=512)
                for event in stream:
                    if isinstance(event, Delta):
                        print(event.text, end="", flush=True)
                answer = stream.progress.answers[0]
                results = [result_of(call) for call in answer.tool_calls]
                if not results:
                    break
                for call, result in zip(answer.tool_calls, results, strict=True):
                    print(f"\n{call.name}({call.arguments_json}) -> {result.content}")
                messages += [answer.message, *results]
    except FissileError as error:
        print(error, file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["127.0.0.1:50051"]))
