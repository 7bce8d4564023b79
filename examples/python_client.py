"""Calls a running router with only grpcio and the stubs: `python_client.py [HOST:PORT] [PROMPT]`.

In a checkout run it with .venv/bin/python, which finds the stubs; elsewhere put `protos/` on the PYTHONPATH.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from fissile.v1 import inference_pb2, inference_pb2_grpc


def main(address: str = "127.0.0.1:50051", prompt: str = "Tell me a story.") -> None:
    """Streams one answer and prints the facts in its last message."""
    with grpc.insecure_channel(address) as channel:
        router = inference_pb2_grpc.InferenceServiceStub(channel)

        for model in router.ListModels(inference_pb2.ListModelsRequest()).models:
            print(f"{model.name}: {model.architecture}, up to {model.max_model_len} tokens")

        request = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content=prompt)],
            sampling_params=inference_pb2.SamplingParams(temperature=0.8, seed=7, max_tokens=128),
        )
        # The timeout is the deadline of the whole answer. Leaving the loop early does not end the call: `cancel` does.
        for part in router.Chat(request, timeout=60):
            print(part.delta.content, end="", flush=True)
            if part.HasField("finish"):
                finish = part.finish
                reason = inference_pb2.FinishReason.Name(finish.reason)
                ttft_ms = finish.timings.ttft.ToMicroseconds() / 1000
                print(f"\n{reason}, {finish.usage.completion_tokens} tokens, first one after {ttft_ms:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        default="127.0.0.1:50051",
        help="Router. Default: 127.0.0.1:50051, where `fissile serve` listens.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default="Tell me a story.", help="Message to the model.")
    given = parser.parse_args()
    try:
        main(given.address, given.prompt)
    except grpc.RpcError as error:
        # A stream that does not end with OK was cut: the text so far is partial. The code says whether to retry.
        sys.exit(f"error: {error.code().name}: {error.details()}")
