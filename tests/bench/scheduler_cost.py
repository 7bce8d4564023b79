"""Engine-thread cost of a step without the model: schedule() and postprocess(), including the batch's construction.

    python -m tests.bench.scheduler_cost

Prints:

- the time and memory to make a pool of a million blocks;
- microseconds per running sequence and step, with 10 000 sequences waiting;
- milliseconds of a step of 256 sequences with long contexts, including their block tables for the model runner, which
  make most of the gap between two steps;
- the longest step while 64 sequences follow a prompt of 100,000 tokens.

All times are thread times, so other processes on the machine count little.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time

import numpy as np

from common.config import Config
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.model.block_tables import BlockTables

NUM_BLOCKS = 1_000_000
NUM_WAITING = 10_000
PROMPT_TOKENS = 32


def make_scheduler(num_running: int) -> Scheduler:
    """A scheduler with a pool of a million blocks."""
    return Scheduler(
        Config(
            num_kvcache_blocks=NUM_BLOCKS,
            enable_prefix_caching=True,
            eos_token_id=0,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(num_running, 16384),
        )
    )


def add_sequences(scheduler: Scheduler, count: int) -> None:
    """Sequences that run until the benchmark ends."""
    params = SamplingParams(max_tokens=5000)
    tail = [1 + i % 1000 for i in range(PROMPT_TOKENS - 1)]
    scheduler.add_group(Sequence([i, *tail], 16, params) for i in range(count))


def timed_step(scheduler: Scheduler) -> tuple[ScheduledBatch, float]:
    """One step, and the microseconds of schedule() and postprocess() together."""
    start = time.thread_time()
    scheduled = scheduler.schedule(0.0)
    middle = time.thread_time()
    assert scheduled is not None
    batch, seqs = scheduled
    output = ScheduledBatchOutput({i: (7,) for i, final in zip(batch.req_ids, batch.is_final, strict=True) if final})
    resumed = time.thread_time()
    scheduler.postprocess(seqs.values(), output, batch=batch, now=0.0)
    scheduler.take_outputs()
    return batch, 1e6 * (time.thread_time() - resumed + middle - start)


def report(num_running: int, num_steps: int) -> str:
    """One line: median, mean and 99th percentile over steps in which all sequences decode. They do so in step, so that
    once in 16 steps all of them fill a block, publish it and take another."""
    scheduler = make_scheduler(num_running)
    add_sequences(scheduler, num_running + NUM_WAITING)
    while timed_step(scheduler)[0].total_seqs_num_decode < num_running:
        pass
    # As the worker does when it has loaded: else the collector walks a million blocks now and then.
    gc.collect()
    gc.freeze()
    times = sorted(timed_step(scheduler)[1] / num_running for _ in range(num_steps))
    median, mean, p99 = statistics.median(times), statistics.mean(times), times[int(0.99 * len(times))]
    figures = f"{median:.2f} us per sequence and step, mean {mean:.2f}, p99 {p99:.2f}"
    return f"{num_running:5} decodes, {NUM_WAITING} waiting: {figures}"


def report_contexts(num_tokens: int, num_steps: int) -> str:
    """One line: the gap between two decodes of 256 sequences of `num_tokens` tokens each."""
    scheduler, tables = make_scheduler(256), BlockTables()
    params = SamplingParams(max_tokens=5000)
    scheduler.add_group(Sequence([i, *range(1, num_tokens)], 16, params) for i in range(256))
    times: list[float] = []
    while len(times) < num_steps:
        batch, us = timed_step(scheduler)
        if batch.is_plain_decode and len(batch.req_ids) == 256:
            start = time.thread_time()
            tables.of_step(batch.tables, -(-np.array(batch.context_lens) // 16))
            times.append(us / 1000 + 1000 * (time.thread_time() - start))
    ordered = sorted(times[1:])
    median, p99 = statistics.median(ordered), ordered[int(0.99 * len(ordered))]
    return f"256 decodes of {num_tokens} tokens: {median:.2f} ms per step, p99 {p99:.2f}"


def report_followers(num_followers: int, num_tokens: int) -> str:
    """One line: times of the steps that admit sequences whose prompts are cached except the last three tokens."""
    scheduler, prompt = make_scheduler(256), list(range(1, num_tokens + 1))
    seqs = [Sequence([*prompt, i, i, i], 16, SamplingParams(max_tokens=5000)) for i in range(1, num_followers + 2)]
    scheduler.add_group(seqs[:1])
    while seqs[0].first_token_time is None:
        timed_step(scheduler)
    scheduler.add_group(seqs[1:])
    times: list[float] = []
    while any(seq.first_token_time is None for seq in seqs):
        times.append(timed_step(scheduler)[1] / 1000)
    median = statistics.median(times)
    return f"{num_followers} followers of {num_tokens} tokens: {median:.1f} ms per step, longest {max(times):.1f}"


def report_pool() -> str:
    """One line: time and memory of creating a million blocks."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    scheduler = make_scheduler(16)
    seconds = time.thread_time() - start
    size = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return f"{scheduler.block_manager.num_blocks} blocks: {seconds:.2f} s, {size:.0f} MiB"


if __name__ == "__main__":
    print(report_pool())
    for num_running, num_steps in ((16, 400), (256, 200), (1024, 100), (4096, 40)):
        print(report(num_running, num_steps))
    print(report_contexts(8000, 200))
    print(report_followers(64, 100_000))
