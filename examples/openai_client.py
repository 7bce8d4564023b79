"""Streams a chat from `fissile http` with the `openai` package: `python openai_client.py [URL] [MODEL]`.

Needs `pip install openai`. Start the service with `fissile serve --http-port 8000`.
"""

from __future__ import annotations

import sys

from openai import OpenAI

URL = "http://127.0.0.1:8000/v1"


def main() -> None:
    """Asks the first model, or the one that is named, and prints its answer as it arrives."""
    client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else URL, api_key="none")
    model = sys.argv[2] if len(sys.argv) > 2 else client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story."}],
        seed=7,
        max_tokens=48,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
