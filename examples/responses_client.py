"""Lets a model use a tool by OpenAI's Responses API: `python examples/responses_client.py MODEL [URL]`.

Needs `pip install openai`, and a facade (`fissile http`) in front of a router. MODEL is a name that `fissile models`
prints. The answer arrives as events. The whole conversation is sent each time, because responses are not stored.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import openai

QUESTION = "What is the weather in Paris and in Oslo?"
SKIES = {"Paris": "sunny", "Oslo": "snowy"}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
MOST_ROUNDS = 4


def weather(arguments: str) -> str:
    """The weather for the arguments of a call; a strict tool's arguments match its schema."""
    city = json.loads(arguments)["city"]
    return SKIES.get(city, f"{city!r} is not known")


def answer(client: openai.OpenAI, model: str, items: list[Any]) -> bool:
    """Prints the next answer and appends its items and the results of its calls; True if it has called a tool."""
    results: list[Any] = []
    asked: dict[str, Any] = {"model": model, "input": items, "tools": [WEATHER], "store": False, "temperature": 0}
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        elif event.type == "response.output_item.done":
            items.append(event.item.to_dict())
            if event.item.type == "function_call":
                result = weather(event.item.arguments)
                print(f"{event.item.name}({event.item.arguments}) -> {result}")
                results.append({"type": "function_call_output", "call_id": event.item.call_id, "output": result})
        elif event.type == "response.failed":
            sys.exit(f"the answer has failed: {event.response.error}")
    items += results
    return bool(results)


def main(model: str, url: str) -> int:
    """Prints a conversation; 1 if the service refuses it."""
    print(f"> {QUESTION}")
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("FISSILE_API_KEY", "none")) as client:
            for _ in range(MOST_ROUNDS):
                if not answer(client, model, items):
                    break
    except openai.OpenAIError as error:
        print(error, file=sys.stderr)
        return 1
    print()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "http://127.0.0.1:8000"
    parser.add_argument("model", metavar="MODEL", help="Name of the model.")
    parser.add_argument("url", nargs="?", metavar="URL", default=default, help=f"Facade. Default: {default}.")
    arguments = parser.parse_args()
    sys.exit(main(arguments.model, arguments.url))
