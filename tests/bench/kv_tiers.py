"""Time to the first token of a cached prompt: `python -m tests.bench.kv_tiers --model CHECKPOINT [--tokens 4000]`.

One engine and one prompt. The prompt is computed once, and its blocks go down to all tiers: host memory, files, a Redis
server if `redis-server` is installed, and a Mooncake Store if its client is (tests/peers/mooncake.py). Then its time to
the first token is measured with an empty KV cache, computed and with each tier alone, in turns. For each source it
prints the median, the bytes that it moved, and the floor: those bytes over the rate at which one thread reads the same
values from that medium and does no more.

Without --model the weights are random, in the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.config import Config
from common.params.sampling_params import SamplingParams
from tests.bench.decode_step import SHAPES
from tests.checkpoints import make_checkpoint
from tests.peers.environment import PEERS
from tests.peers.mooncake import MooncakeMaster
from tests.redis_server import running_redis
from worker.engine.tier_lookups import TierLookups, root_name
from worker.kv_tiers.tier_option import open_tiers
from worker.kv_tiers.tiers import DROPPED, HIT, LATE, STORED, KvTier, KvTiers
from worker.llm_engine import LLMEngine

_ROOM: Final = "2GiB"
_BLOCK: Final = 16
_COMPUTED: Final = "computed"


@contextmanager
def redis_tier(folder: Path) -> Iterator[str]:
    """A Redis server as a tier; an empty text where it is not installed."""
    if shutil.which("redis-server") is None:
        yield ""
        return
    with running_redis(folder) as server:
        yield server.url


@contextmanager
def mooncake_tier(folder: Path) -> Iterator[str]:
    """A Mooncake Store as a tier, with the worker's own memory; an empty text where the client is not installed."""
    packages = next((PEERS / "mooncake").glob("lib/python*/site-packages/mooncake"), None)
    if packages is None:
        yield ""
        return
    master = MooncakeMaster(packages.parent, folder / "mooncake.log")
    sys.path.append(str(packages.parent))
    os.environ.update(master.variables)
    master.start()
    try:
        yield f"{master.tier}?segment={_ROOM}"
    finally:
        master.send(signal.SIGKILL)


class NameList:
    """A tier that keeps only the names of blocks, in order."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    def get(self, name: bytes) -> None:
        """No value."""

    def drop(self, name: bytes) -> None:
        """No value to forget."""

    def close(self) -> None:
        """Has no threads."""

    def put(self, name: bytes, parent: bytes, value: bytes) -> bool:
        """Keeps the name."""
        del parent, value
        self.names.append(name)
        return True


class Sources:
    """An engine, and its tiers one by one.

    Args:
        model: checkpoint.
        texts: each tier as an option, by name.
        num_tokens: of the prompt.
    """

    def __init__(self, model: Path, texts: dict[str, str], num_tokens: int) -> None:
        self._prompt = [5 + i * 7919 % 200 for i in range(num_tokens)]
        length = num_tokens + 16
        self._engine = LLMEngine(
            Config(
                str(model),
                max_model_len=length,
                num_kvcache_blocks=length // _BLOCK + 2,
                kv_cache_block_size=_BLOCK,
                enable_prefix_caching=True,
                max_num_batched_tokens=1024,
                kernels="cpu",
            )
        )
        self.block_bytes = int(getattr(self._engine.core.runner, "kv_block_bytes", 0))
        self.num_blocks = (num_tokens - 1) // _BLOCK
        self.tiers = {
            name: tier for text in texts.values() for name, tier in open_tiers(text, self.block_bytes).items()
        }
        self._list = NameList()
        self._stores = {name: KvTiers({name: tier}, self.block_bytes) for name, tier in self.tiers.items()}

    def fill(self) -> float:
        """Computes the prompt, and waits until all tiers have its blocks. Returns the seconds of computing."""
        every: dict[str, KvTier] = {**self.tiers, "names": self._list}
        both = KvTiers(every, self.block_bytes)
        self._use(both)
        began = time.monotonic()
        self._answer()
        seconds = time.monotonic() - began
        core, wanted = self._engine.core, len(self._prompt) // _BLOCK * len(every)
        while sum(count for (_, result), count in both.counts().items() if result in (STORED, DROPPED)) < wanted:
            # The last blocks go down in a step of their own.
            core.step()
            time.sleep(0.05)
        for name in self.tiers:
            assert both.counts().get((name, STORED)) == len(self._list.names), both.counts()
        return seconds

    def ttft_s(self, name: str) -> float:
        """Seconds to the first token with an empty KV cache."""
        self._use(self._stores.get(name))
        began = time.monotonic()
        self._answer()
        return time.monotonic() - began

    def count(self, name: str, result: str) -> int:
        """Blocks of a tier with this result, or prompts that no longer waited for it."""
        counts = self._stores[name].counts() if name in self._stores else {}
        return sum(count for (_, each), count in counts.items() if each == result)

    def read_s(self, name: str) -> float:
        """Seconds in which one thread reads all blocks of the prompt from a tier, the best of three."""
        seconds = []
        for _ in range(3):
            began = time.monotonic()
            assert all(self.tiers[name].get(each) is not None for each in self._list.names[: self.num_blocks])
            seconds.append(time.monotonic() - began)
        return min(seconds)

    def close(self) -> None:
        """Ends the tiers."""
        for store in self._stores.values():
            store.close()
        self._engine.close()

    def _use(self, store: KvTiers | None) -> None:
        core = self._engine.core
        blocks = core.scheduler.block_manager
        blocks.flush()
        blocks.on_published = blocks.on_forgotten = None
        core.tiers = None if store is None else TierLookups(core.scheduler.lifecycle, store, root_name(["bench"]))

    def _answer(self) -> None:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        self._engine.generate([self._prompt], params)


def rows(sources: Sources, rounds: int) -> Iterator[str]:
    """Lines of the table."""
    yield f"{'source':9} {'TTFT':>10} {'moved':>11} {'floor':>10} {'rate':>10}  late"
    names = [_COMPUTED, *sources.tiers]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            times[name].append(sources.ttft_s(name))
    for name in names:
        moved = sources.count(name, HIT) // rounds * sources.block_bytes
        line = f"{name:9} {1e3 * statistics.median(times[name]):7.0f} ms {moved / 2**20:7.1f} MiB"
        if name in sources.tiers:
            rate = sources.num_blocks * sources.block_bytes / sources.read_s(name)
            line += f" {1e3 * moved / rate:7.0f} ms {rate / 1e9:5.2f} GB/s  {sources.count(name, LATE)}"
        yield line


def main() -> None:
    """Prints a line for each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint; by default random weights")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        texts = {"memory": f"memory:{_ROOM}", "files": f"files:{folder / 'kv'}:{_ROOM}"}
        texts |= {
            "redis": stack.enter_context(redis_tier(folder)),
            "mooncake": stack.enter_context(mooncake_tier(folder)),
        }
        model = options.model or make_checkpoint(
            folder / "model", dtype="bfloat16", max_position_embeddings=8192, **SHAPES["qwen3-0.6b"]
        )
        sources = Sources(model, {name: text for name, text in texts.items() if text}, options.tokens)
        stack.callback(sources.close)
        print(f"{options.tokens} tokens, blocks of {sources.block_bytes / 2**20:.2f} MiB", flush=True)
        print(f"first computed in {sources.fill():.2f} s, blocks stored in all tiers", flush=True)
        for line in rows(sources, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
