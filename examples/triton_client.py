"""Calls a running router as clients of Triton and KServe do: `triton_client.py [HOST:PORT] [PROMPT]`.

Needs `pip install "tritonclient[grpc]"`, in an environment without the service: it wants an older protobuf.
"""

from __future__ import annotations

import argparse
import queue
import sys
from typing import Any


def main(address: str, prompt: str) -> None:
    """Prints one answer as a whole, then the same one as it is generated."""
    # Here, so that --help works without these packages.
    import numpy as np  # noqa: PLC0415
    from tritonclient.grpc import InferenceServerClient, InferInput  # noqa: PLC0415

    def tensor(name: str, value: object, datatype: str) -> InferInput:
        made = InferInput(name, [1], datatype)
        made.set_data_from_numpy(np.array([value], dtype=bool if datatype == "BOOL" else object))
        return made

    client = InferenceServerClient(address)
    parameters = {"max_tokens": 64, "temperature": 0.8, "seed": 7}
    # The router serves one model; with several, the first argument is a model's name.
    text = tensor("text_input", prompt.encode(), "BYTES")
    whole = client.infer("", [text], parameters=parameters, client_timeout=60)
    print(whole.as_numpy("text_output")[0].decode())

    parts: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    client.start_stream(lambda result, error: parts.put((result, error)), stream_timeout=60)
    client.async_stream_infer("", [text, tensor("stream", True, "BOOL")], parameters=parameters)
    is_last = False
    while not is_last:
        result, error = parts.get()
        if error is not None:
            raise error
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        is_last = result.get_response().parameters["triton_final_response"].bool_param
    print(f"\n{result.as_numpy('finish_reason')[0].decode()}")
    client.stop_stream()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        default="127.0.0.1:50051",
        help="Router. Default: 127.0.0.1:50051, where `fissile serve` listens.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default="Once upon a time", help="Text to continue.")
    given = parser.parse_args()
    try:
        main(given.address, given.prompt)
    except Exception as error:
        # An error of the server names its status: whether to retry is told by that.
        sys.exit(f"error: {error}")
