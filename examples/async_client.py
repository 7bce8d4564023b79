"""Asks several things at once with the client library: `python examples/async_client.py [HOST:PORT ...]`.

Reads an API key from FISSILE_API_KEY and CAs from FISSILE_TLS_CA, if they are set. All answers belong to one trace,
whose id is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys

from fissile.client import AsyncClient, FissileError

QUESTIONS = ("Spell cat.", "What is 12 + 7?", "Tell me a story.")


async def main(routers: list[str]) -> int:
    """Prints each answer as soon as it is whole; 1 if a call fails."""
    trace_id = secrets.token_hex(16)
    traceparent = ("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01")
    key, ca = os.environ.get("FISSILE_API_KEY", ""), os.environ.get("FISSILE_TLS_CA")
    try:
        made = AsyncClient(routers, api_key=key, tls_ca=ca)
    except ValueError as error:
        sys.exit(f"error: {error}")
    async with made as client:

        async def ask(question: str) -> bool:
            try:
                answer = await client.chat(question, temperature=0, max_tokens=64, metadata=[traceparent])
            except FissileError as error:
                print(f"{question} {error}", file=sys.stderr)
                return False
            print(f"{question} {answer.text.strip()} ({answer.finish.usage.completion_tokens} tokens)")
            return True

        answered = await asyncio.gather(*map(ask, QUESTIONS))
    print(f"trace {trace_id}")
    return 0 if all(answered) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "routers",
        nargs="*",
        metavar="HOST:PORT",
        default=["127.0.0.1:50051"],
        help="Routers, of which any may answer. Default: 127.0.0.1:50051, where `fissile serve` listens.",
    )
    sys.exit(asyncio.run(main(parser.parse_args().routers)))
