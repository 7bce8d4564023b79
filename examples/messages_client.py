"""Lets a model use a tool by Anthropic's Messages API: `python examples/messages_client.py MODEL [URL]`.

Needs `pip install anthropic`, and a facade (`fissile http`) in front of a router. MODEL is a name that `fissile models`
prints. The answer arrives as events.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import anthropic

QUESTION = "What is the weather in Paris and in Oslo?"
SKIES = {"Paris": "sunny", "Oslo": "snowy"}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
MOST_ROUNDS = 4


def answer(client: anthropic.Anthropic, model: str, messages: list[Any]) -> bool:
    """Prints the next answer and appends it with the results of its calls; True if it has called a tool."""
    asked: dict[str, Any] = {"model": model, "max_tokens": 512, "tools": [WEATHER], "messages": messages}
    with client.messages.stream(**asked) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        message = stream.get_final_message()
    results = []
    for block in message.content:
        if block.type == "tool_use":
            city = str(block.input["city"])
            result = SKIES.get(city, f"{city!r} is not known")
            print(f"{block.name}({block.input}) -> {result}")
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
    messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
    messages.append({"role": "user", "content": results})
    return bool(results)


def main(model: str, url: str) -> int:
    """Prints a conversation; 1 if the service refuses it."""
    print(f"> {QUESTION}")
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    try:
        with anthropic.Anthropic(base_url=url, api_key=os.environ.get("FISSILE_API_KEY", "none")) as client:
            for _ in range(MOST_ROUNDS):
                if not answer(client, model, messages):
                    break
    except anthropic.AnthropicError as error:
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
