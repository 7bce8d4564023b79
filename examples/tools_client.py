"""Lets a model use a tool, the demo model or another: `python examples/tools_client.py [HOST:PORT ...]`.

The model is asked three questions. Its calls are answered, and it continues with the results, until it calls nothing
more. The weather is made up; put your own functions into TOOLS and FUNCTIONS. The model's chat template must support
tools, as the demo model's does (`fissile models --json` has CAPABILITY_TOOLS).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from fissile.client import Client, Delta, FissileError, tool
from fissile.v1.inference_pb2 import ChatMessage, Tool, ToolCall

MOST_ROUNDS = 4
QUESTIONS = ("What is the weather in Paris and in Oslo?", "What is 12 times 7?", "Thank you!")
SKIES = {"Paris": "sunny", "Oslo": "snowy"}


def declared(name: str, description: str, arguments: dict[str, str]) -> Tool:
    """A tool, with the JSON type of each of its arguments."""
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    return tool(name, description, {"type": "object", "properties": properties, "required": list(properties)})


TOOLS = [
    declared("get_weather", "The weather in a city.", {"city": "string"}),
    declared("multiply", "Product of two numbers.", {"a": "integer", "b": "integer"}),
]


def get_weather(city: str) -> str:
    """The weather in a city, or that it is not known."""
    return json.dumps({"weather": SKIES[city]} if city in SKIES else {"error": f"{city!r} is not known"})


def multiply(a: int, b: int) -> str:
    """Product of two numbers."""
    return json.dumps({"result": a * b})


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather, "multiply": multiply}


def result_of(call: ToolCall) -> ChatMessage:
    """The message that answers a call. A model may call an unknown tool, or give arguments that are not JSON."""
    try:
        result = FUNCTIONS[call.name](**json.loads(call.arguments_json))
    except (KeyError, TypeError, ValueError) as error:
        result = json.dumps({"error": f"{type(error).__name__}: {error}"})
    return ChatMessage(role="tool", tool_call_id=call.id, name=call.name, content=result)


def answer(client: Client, messages: list[ChatMessage]) -> None:
    """Prints the answer to a conversation and appends it: calls, their results, and the model's final text."""
    for _ in range(MOST_ROUNDS):
        stream = client.chat_stream(messages, tools=TOOLS, temperature=0, max_tokens=512)
        for event in stream:
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)
        said = stream.progress.answers[0]
        results = [result_of(call) for call in said.tool_calls]
        messages += [said.message, *results]
        if said.text:
            print()
        for call, result in zip(said.tool_calls, results, strict=True):
            print(f"{call.name}({call.arguments_json}) -> {result.content}")
        if not results:
            return


def main(routers: list[str]) -> int:
    """Prints a conversation; 1 if a call of the service fails."""
    messages: list[ChatMessage] = []
    try:
        with Client(routers) as client:
            for question in QUESTIONS:
                print(f"> {question}")
                messages.append(ChatMessage(role="user", content=question))
                answer(client, messages)
    except (FissileError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "routers",
        nargs="*",
        metavar="HOST:PORT",
        default=["127.0.0.1:50051"],
        help="Routers, of which any may answer. Default: 127.0.0.1:50051, where `fissile serve` listens.",
    )
    sys.exit(main(parser.parse_args().routers))
