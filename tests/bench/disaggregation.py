"""Gaps of running streams beside long prompts, on two fleets: `python -m tests.bench.disaggregation [--seconds 20]`.

Both fleets have two workers and the same load: streams that decode all the time, and a long prompt with a short answer
every so often. In the one each worker does both, in the other one computes prompts and one decodes, and they share a
folder of KV blocks. Prints the gaps between the tokens of the streams, and the long prompts' time to the first token.

Real workers on one machine share its processors, so a prefill slows the decodes of the other process. With `--simulate`
each worker has a chip of its own, whose steps take the time of a cost model, and the processors only schedule.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import threading
import time
from pathlib import Path

from fissile.v1 import inference_pb2 as pb

from tests.bench.decode_step import SHAPES
from tests.bench.router.bed import quantile, show
from tests.checkpoints import make_checkpoint
from tests.e2e.service import Service, running_service
from tests.e2e.simulated import wait_workers

_VOCAB = range(5, 200)
_ANSWER = 16
_WARM_S = 3.0


class Load:
    """Streams and long prompts against one fleet, and their times in seconds.

    Attributes:
        gaps: between two tokens of a stream.
        ttfts: of long prompts, to the first token.
        second_gaps: of long prompts, from the first to the second token, in which a request moves.
    """

    def __init__(self, service: Service, options: argparse.Namespace) -> None:
        self.gaps: list[float] = []
        self.ttfts: list[float] = []
        self.second_gaps: list[float] = []
        self._service = service
        self._options = options
        self._is_over = threading.Event()
        self._counts_from = time.monotonic() + _WARM_S

    def run(self) -> None:
        """Runs for the time of the options."""
        threads = [threading.Thread(target=self._stream, args=(i,)) for i in range(self._options.streams)]
        threads.append(threading.Thread(target=self._prompts))
        for thread in threads:
            thread.start()
        time.sleep(_WARM_S + self._options.seconds)
        self._is_over.set()
        for thread in threads:
            thread.join()

    def _ask(self, seed: int, tokens: int, answer: int) -> list[float]:
        """Times of the tokens of one request, from its start."""
        rnd = random.Random(seed)
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[rnd.choice(_VOCAB) for _ in range(tokens)]))
        asked.sampling_params.max_tokens, asked.sampling_params.ignore_eos = answer, True
        asked.output_options.return_token_ids = True
        begin, times = time.monotonic(), []
        call = self._service.stub.Generate(asked)
        for part in call:
            now = time.monotonic()
            times += [now] * len(part.token_ids)
            if self._is_over.is_set():
                call.cancel()
                break
        return [begin, *times]

    def _stream(self, number: int) -> None:
        turn = 0
        while not self._is_over.is_set():
            turn += 1
            # The first token of a stream is of its prefill.
            times = self._ask(number + 100 * turn, 32, 1500)[1:]
            self.gaps += [b - a for a, b in itertools.pairwise(times) if a > self._counts_from]

    def _prompts(self) -> None:
        threads, number = [], 0
        while not self._is_over.wait(self._options.every):
            number += 1
            threads.append(threading.Thread(target=self._prompt, args=(-number,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _prompt(self, seed: int) -> None:
        times = self._ask(seed, self._options.prompt, _ANSWER)
        if len(times) > 2 and times[0] > self._counts_from:
            self.ttfts.append(times[1] - times[0])
            self.second_gaps.append(times[2] - times[1])


def measure(fleet: str, model: Path, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """The figures of one fleet: `both` or `apart`."""
    given = ["--max-model-len", str(options.prompt + 2048)]
    given += ["--simulate", options.simulate] if options.simulate else ["--kv-cache-memory", "1GiB"]
    roles: tuple[str, ...] = ("both", "both")
    if fleet == "apart":
        roles = ("prefill", "decode")
        given += ["--kv-tiers", f"files:{folder / 'kv'}:8GiB"]
    (folder / fleet).mkdir()
    with running_service(folder / fleet, model, roles=roles, worker_options=given) as service:
        wait_workers(service, 2)
        load = Load(service, options)
        load.run()
    return {
        "workers": "2 x both" if fleet == "both" else "prefill + decode",
        "tokens/s": len(load.gaps) / options.seconds,
        **{f"gap {name} ms": 1e3 * quantile(load.gaps, q) for name, q in _QUANTILES.items()},
        "prompts": len(load.ttfts),
        "TTFT p50 ms": 1e3 * quantile(load.ttfts, 0.5),
        "TTFT p99 ms": 1e3 * quantile(load.ttfts, 0.99),
        "2nd token p50 ms": 1e3 * quantile(load.second_gaps, 0.5),
    }


_QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


def main() -> None:
    """Prints a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", default="", help="preset of simulated workers; without it they compute")
    parser.add_argument("--shape", choices=list(SHAPES), default="demo", help="of the model that real workers compute")
    parser.add_argument("--streams", type=int, default=8, help="that decode")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=1.0, help="seconds from one long prompt to the next")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each fleet")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = {"max_position_embeddings": 16_384, **SHAPES[options.shape]}
        model = make_checkpoint(folder / "model", dtype="bfloat16", **shape)
        rows = [measure(fleet, model, folder, options) for fleet in ("both", "apart")]
    show(rows, as_json=options.json)


if __name__ == "__main__":
    main()
