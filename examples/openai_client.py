"""Streams a chat by OpenAI's API: `python examples/openai_client.py [MODEL] [URL]`.

Needs `pip install openai`, and a facade (`fissile serve --http-port 8000`, or `fissile http` in front of routers). The
stream continues with the same bytes when its worker or its router is lost.
"""

from __future__ import annotations

import argparse
import os
import sys

import openai

QUESTION = "Tell me a story."


def main(model: str, url: str) -> int:
    """Prints an answer as it arrives; 1 if the service refuses it."""
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("FISSILE_API_KEY", "none")) as client:
            name = model or client.models.list().data[0].id
            stream = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": QUESTION}],
                seed=7,
                max_tokens=48,
                stream=True,
            )
            for chunk in stream:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            print()
    except openai.OpenAIError as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    summary = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary[0], epilog=summary[2])
    parser.add_argument("model", nargs="?", default="", help="Name of the model. Default: the first one.")
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="URL of the facade. Default: %(default)s."
    )
    arguments = parser.parse_args()
    sys.exit(main(arguments.model, arguments.url))
