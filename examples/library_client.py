"""Streams an answer with the client library: `python examples/library_client.py [HOST:PORT ...]`.

With several routers, a stream continues at the next one when its router dies; nothing is lost, repeated or changed.
"""

from __future__ import annotations

import argparse
import sys

from fissile.client import Client, Delta, Finished, FissileError
from fissile.v1.inference_pb2 import FinishReason


def main(routers: list[str]) -> int:
    """Streams one answer and prints what its end says; 1 if the call fails."""
    try:
        with Client(routers) as client, client.chat_stream("Tell me a story.", temperature=0.8, seed=7) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    print(event.text, end="", flush=True)
                elif isinstance(event, Finished):
                    usage = event.finish.usage
                    print(f"\n{FinishReason.Name(event.finish.reason)}, {usage.completion_tokens} tokens")
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
