"""What a step costs the engine thread besides the model: schedule() and postprocess() at 256 running decodes.

    python -m tests.bench.scheduler_cost

Thread time, so that other processes on the machine count little. Figures: tests/bench/README.md.
"""

from __future__ import annotations

import statistics
import time

from common.config import Config
from common.sampling_params import SamplingParams
from worker.batch import ScheduledBatch, ScheduledBatchOutput
from worker.scheduler import Scheduler
from worker.sequence import Sequence

NUM_RUNNING = 256


def make_scheduler(prompt_tokens: int, num_waiting: int) -> Scheduler:
    """`NUM_RUNNING` sequences that run after a few steps, and others that wait for one of them to end."""
    config = Config(num_kvcache_blocks=40_000, enable_prefix_caching=True, eos_token_id=0, max_num_seqs=NUM_RUNNING)
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=5000)
    tail = [1 + i % 1000 for i in range(prompt_tokens - 1)]
    scheduler.add_group(Sequence([i, *tail], 16, params) for i in range(NUM_RUNNING + num_waiting))
    return scheduler


def timed_step(scheduler: Scheduler) -> tuple[ScheduledBatch, float]:
    """One step, and the milliseconds of schedule() and postprocess() together."""
    start = time.thread_time()
    scheduled = scheduler.schedule(0.0)
    middle = time.thread_time()
    assert scheduled is not None
    batch, seqs = scheduled
    output = ScheduledBatchOutput({i: (7,) for i, final in zip(batch.req_ids, batch.is_final, strict=True) if final})
    resumed = time.thread_time()
    scheduler.postprocess(seqs.values(), output, batch=batch, now=0.0)
    scheduler.take_outputs()
    return batch, 1e3 * (time.thread_time() - resumed + middle - start)


def report(prompt_tokens: int, num_waiting: int) -> str:
    """One line: median and 99th percentile of 400 steps in which all sequences decode."""
    scheduler = make_scheduler(prompt_tokens, num_waiting)
    while timed_step(scheduler)[0].total_seqs_num_decode < NUM_RUNNING:
        pass
    times = sorted(timed_step(scheduler)[1] for _ in range(400))
    median, p99 = statistics.median(times), times[int(0.99 * len(times))]
    load = f"{NUM_RUNNING} decodes, prompts of {prompt_tokens}, {num_waiting} waiting"
    return f"{load}: {median:.2f} ms a step, p99 {p99:.2f} ms"


if __name__ == "__main__":
    for prompt_tokens, num_waiting in ((32, 0), (512, 0), (512, 2000)):
        print(report(prompt_tokens, num_waiting))
