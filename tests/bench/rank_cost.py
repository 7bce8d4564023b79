"""What ranks cost: sending a step, a sum over two processes, and a decode step on one and on two ranks.

`python -m tests.bench.rank_cost`; the figures are in docs/reference/performance.md.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.config import Config
from common.params.sampling_params import SamplingParams
from common.process.available_memory import available_memory
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, SequenceColumns
from worker.engine.core import EngineCore
from worker.engine.sequence import Sequence
from worker.kv_pool import with_pool
from worker.model.model_runner import ModelRunner
from worker.progress import StartProgress
from worker.ranks.batch_delta import BatchDecoder, BatchEncoder
from worker.ranks.frames import FrameReader, encode
from worker.ranks.rank_client import RankGroup
from worker.ranks.rank_setup import load_ranks
from worker.ranks.topology import Topology

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
}


def best_us(work: Callable[[], object], times: int = 200) -> float:
    """The shortest of many runs, microseconds: other processes only ever make it longer."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found) * 1e6


def sending() -> None:
    """Prints the cost of sending a decode step."""
    print("| sequences | context | bytes | encode, us | decode, us |\n| --- | --- | --- | --- | --- |")
    for count, context in ((1, 1000), (64, 1000), (256, 8000)):
        print(f"| {count} | {context} | {send_decodes(count, context)} |")


def send_decodes(count: int, context: int) -> str:
    """Bytes of one decode step, and what encoding and decoding it take."""
    seqs = [Sequence([1] * context, 16) for _ in range(count)]
    for seq in seqs:
        seq.num_computed_tokens, seq.block_table = context - 1, list(range(1 + context // 16))
    rows = {seq.id: seq for seq in seqs}
    batch = ScheduledBatch(rows, [1] * count, count, total_seqs_num_decode=count, columns=SequenceColumns(seqs))
    encoder, decoder = BatchEncoder(), BatchDecoder()
    (first,) = FrameReader().feed(encode(encoder.encode(batch)))
    decoder.decode(*first)
    frame = encode(encoder.encode(batch))
    encode_us = best_us(lambda: encode(encoder.encode(batch)))
    decode_us = best_us(lambda: [decoder.decode(*sent) for sent in FrameReader().feed(frame)])
    return f"{len(frame)} | {encode_us:.0f} | {decode_us:.0f}"


def engine(folder: Path, ranks: int) -> EngineCore:
    """On one thread each."""
    model_config = ModelConfig.from_folder(folder)
    config = Config(
        model=str(folder),
        kernels="cpu",
        dtype="float32",
        kv_cache_memory=1 << 26,
        max_model_len=1024,
        tensor_parallel_size=ranks,
    )
    if ranks > 1:
        progress = StartProgress()
        group = RankGroup(Topology(ranks), str(folder), 1, progress)
        config, _ = load_ranks(group, config, model_config, progress)
        return EngineCore(config, group, executor=group)
    runner = ModelRunner(config, model_config)
    config = with_pool(config, 1024, runner.kv_block_bytes, available_memory(runner.mapped_bytes))
    runner.allocate_kv_cache(config.num_kvcache_blocks)
    return EngineCore(config, runner)


def steps(folder: Path, ranks: int, sequences: int) -> list[float]:
    """Durations of decode steps, milliseconds."""
    core = engine(folder, ranks)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for i in range(sequences):
        core.add_request(Sequence([i % 200 + 5] * 32, 16, params))
    found = []
    while core.has_unfinished():
        begin = time.perf_counter()
        core.step()
        found.append((time.perf_counter() - begin) * 1e3)
    core.close()
    return found[4:-1]


def main() -> None:
    sending()
    print("\n| sequences | 1 rank, ms per step (median; best) | 2 ranks |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, "qwen3", **SHAPE)
        for sequences in (1, 16, 64):
            both = [steps(Path(folder), ranks, sequences) for ranks in (1, 2)]
            one, two = (f"{statistics.median(found):.1f}; {min(found):.1f}" for found in both)
            print(f"| {sequences} | {one} | {two} |")


if __name__ == "__main__":
    main()
