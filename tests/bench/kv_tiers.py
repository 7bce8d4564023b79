"""Time to the first token of a cached prompt: `python -m tests.bench.kv_tiers [--tokens 4000] [--rounds 3]`.

Random weights of Qwen3-0.6B's shape in bfloat16, one prompt. In each round its time to the first token is measured with
an empty KV cache: computed, from host memory, from files, and from a Redis server, if `redis-server` is installed.
Prints milliseconds, bytes moved, and the time in which this machine copies as many bytes once.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.cli.serve.ports import free_ports
from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.decode_step import SHAPES
from tests.checkpoints import make_checkpoint
from worker.kv_tiers.tiers import DROPPED, HIT, STORED
from worker.llm_engine import LLMEngine

_ROOM: Final = "8GiB"
_COPIED: Final = 1 << 29


@contextmanager
def redis_tier(folder: Path) -> Iterator[str]:
    """A Redis server as a tier; an empty text where it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield ""
        return
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--dir", str(folder)], stdout=subprocess.DEVNULL
    )
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


class Source:
    """An engine with one tier, which holds the prompt's blocks, or with none."""

    def __init__(self, model: Path, tiers: str, prompt: list[int]) -> None:
        self._prompt = prompt
        self._params = SamplingParams(max_tokens=1, ignore_eos=True)
        length = len(prompt) + 16
        self.engine = LLMEngine(
            Config(
                str(model),
                max_model_len=length,
                num_kvcache_blocks=length // 16 + 2,
                enable_prefix_caching=True,
                max_num_batched_tokens=1024,
                kernels="cpu",
                kv_tiers=tiers,
            )
        )
        self.ttft_s()
        self._wait_stored()

    def ttft_s(self) -> float:
        """Seconds to the first token with an empty KV cache."""
        self.engine.core.scheduler.block_manager.flush()
        begin = time.monotonic()
        self.engine.generate([self._prompt], self._params)
        return time.monotonic() - begin

    def count(self, wanted: str) -> int:
        """Blocks with this result."""
        tiers = self.engine.core.tiers
        counts = {} if tiers is None else tiers.store.counts()
        return sum(count for (_, result), count in counts.items() if result == wanted)

    def _wait_stored(self) -> None:
        while self.engine.core.tiers is not None and self.count(STORED) + self.count(DROPPED) < len(self._prompt) // 16:
            # The last blocks go down in a step of their own.
            self.engine.core.step()
            time.sleep(0.1)


def copy_s(num_bytes: int) -> float:
    """Seconds in which one core copies so many bytes, the best of three."""
    source, target = torch.ones(_COPIED, dtype=torch.uint8), torch.zeros(_COPIED, dtype=torch.uint8)
    times = []
    for _ in range(3):
        begin = time.monotonic()
        target.copy_(source)
        times.append(time.monotonic() - begin)
    return min(times) * num_bytes / _COPIED


def main() -> None:
    """Prints a line for each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, redis_tier(Path(temporary)) as redis:
        folder = Path(temporary)
        model = make_checkpoint(
            folder / "model", dtype="bfloat16", max_position_embeddings=8192, **SHAPES[options.shape]
        )
        prompt = [5 + i * 7919 % 200 for i in range(options.tokens)]
        tiers = {"computed": "", "memory": f"memory:{_ROOM}", "files": f"files:{folder / 'kv'}:{_ROOM}", "redis": redis}
        sources = {name: Source(model, text, prompt) for name, text in tiers.items() if text or name == "computed"}
        times: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(options.rounds):
            for name, source in sources.items():
                times[name].append(source.ttft_s())
        for name, source in sources.items():
            hits = source.count(HIT) // options.rounds
            runner = source.engine.core.runner
            moved = hits * getattr(runner, "kv_block_bytes", 0)
            ms = 1e3 * statistics.median(times[name])
            print(f"{name:9} {ms:9.1f} ms  {moved / 2**20:7.1f} MiB  copied once in {1e3 * copy_s(moved):6.1f} ms")


if __name__ == "__main__":
    main()
