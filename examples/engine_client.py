"""Asks the engine protocols of other projects: `engine_client.py PROTOCOL [HOST:PORT] [PROMPT]`.

`openengine` and `vllm-engine` call a worker that has this door (`fissile worker --doors openengine,vllm-engine`), and
`open-inference` calls a router. All of them give the same text for the same seed. In a checkout run it with
.venv/bin/python, which finds the stubs; those of `vllm-engine` are in the package `smg-grpc-proto`.
"""

from __future__ import annotations

import argparse
import sys

import grpc

# Where workers and routers listen by default.
ADDRESSES = {"openengine": "127.0.0.1:50061", "vllm-engine": "127.0.0.1:50061", "open-inference": "127.0.0.1:50051"}


def ask_openengine(channel: grpc.Channel, prompt: str) -> None:
    """OpenEngine: Dynamo's sidecar speaks it to engines."""
    from fissile.peers.openengine.v1 import openengine_pb2 as pb  # noqa: PLC0415 - each protocol needs its own stubs
    from fissile.peers.openengine.v1.openengine_pb2_grpc import InferenceStub  # noqa: PLC0415

    request = pb.GenerateRequest(
        prompt=prompt,
        sampling=pb.SamplingParams(temperature=0.8, top_p=0.95, seed=7),
        stopping=pb.StoppingOptions(max_tokens=64),
    )
    for part in InferenceStub(channel).Generate(request, timeout=60):
        print(part.token.text, end="", flush=True)
        # A failure behind the first token is a message of a stream that ends with OK.
        if part.HasField("error"):
            sys.exit(f"error: {part.error.message}")
    print()


def ask_vllm_engine(channel: grpc.Channel, prompt: str) -> None:
    """vllm.grpc.engine: smg and llm-d speak it to engines. Answers are tokens, which the caller turns into text."""
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb  # noqa: PLC0415
    from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub  # noqa: PLC0415

    # Numbers without presence are sent even if they are 0: `top_p` 0 would be refused.
    params = pb.SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.0, n=1, seed=7, max_tokens=64)
    request = pb.GenerateRequest(text=prompt, sampling_params=params, stream=True)
    for part in VllmEngineStub(channel).Generate(request, timeout=60):
        print(*part.chunk.token_ids, end=" ", flush=True)
    print()


def ask_open_inference(channel: grpc.Channel, prompt: str) -> None:
    """Open Inference Protocol: clients of Triton and KServe speak it to a router."""
    from fissile.peers.inference import open_inference_pb2 as pb  # noqa: PLC0415
    from fissile.peers.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub  # noqa: PLC0415

    request = pb.ModelInferRequest()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt.encode())
    request.parameters["max_tokens"].int64_param = 64
    request.parameters["seed"].int64_param = 7
    request.parameters["temperature"].double_param = 0.8
    request.parameters["top_p"].double_param = 0.95
    answer = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    texts = {output.name: output.contents.bytes_contents for output in answer.outputs}
    print(texts["text_output"][0].decode())


PROTOCOLS = {"openengine": ask_openengine, "vllm-engine": ask_vllm_engine, "open-inference": ask_open_inference}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("protocol", choices=PROTOCOLS, metavar="PROTOCOL", help=", ".join(PROTOCOLS))
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="Worker or router. Default: 127.0.0.1:50061, or 127.0.0.1:50051 for open-inference.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default="Once upon a time", help="Text to continue.")
    given = parser.parse_args()
    try:
        with grpc.insecure_channel(given.address or ADDRESSES[given.protocol]) as channel:
            PROTOCOLS[given.protocol](channel, given.prompt)
    except grpc.RpcError as error:
        sys.exit(f"error: {error.code().name}: {error.details()}")
