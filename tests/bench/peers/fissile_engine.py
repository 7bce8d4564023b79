"""Fissile's engine without a service, as a peer: started by `servers.py`, speaks the lines of `runs.py`."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch

from common.cli.bench.records import Record
from common.cli.bench.workload import Work
from common.config import Config
from common.params.step_defaults import BUDGET_ON_CPU, POLICY_ON_CPU
from tests.bench.peers.runs import Clock, Job, Run, check, clock_from_now, serve_jobs
from worker.llm_engine import LLMEngine, StreamOutput


def run_job(engine: LLMEngine, job: Job) -> Run:
    """A closed loop by `add_request` and `step`."""
    clock = clock_from_now()
    left = deque(enumerate(job.works))
    live: dict[str, tuple[Record, Work]] = {}
    records: list[Record] = []
    while (left or live) and clock() < job.limit_s:
        while left and len(live) < job.concurrency:
            _add(engine, *left.popleft(), live, clock)
        for answer in engine.step():
            record, work = live.pop(answer["request_id"])
            record.ended, record.input_tokens = clock(), answer["num_tokens_input"]
            records.append(check(record, work))
    for request_id in live:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return Run(records, not live and not left)


def _load(config: Config) -> Callable[[Job], Run]:
    engine = LLMEngine(config)
    return lambda job: run_job(engine, job)


def _add(engine: LLMEngine, index: int, work: Work, live: dict[str, tuple[Record, Work]], clock: Clock) -> None:
    now = clock()
    record = Record(index, intended=now, sent=now)

    def note(part: StreamOutput) -> None:
        if part.output_tokens:
            record.arrivals.append(clock())
            record.output_tokens += len(part.output_tokens)

    params = {"temperature": 0.0, "max_tokens": work.output_tokens, "ignore_eos": True}
    request_id = engine.add_request(list(work.token_ids), params, stream_callback=note)
    live[request_id] = (record, work)


def main() -> None:
    """Serves jobs until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-cache-memory", type=int, required=True, help="bytes")
    parser.add_argument("--quantize", default="no", help="as of `fissile worker`")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = Config(
        model=options.model,
        dtype="bfloat16",
        kv_cache_memory=options.kv_cache_memory,
        max_num_batched_tokens=BUDGET_ON_CPU,
        scheduling_policy=POLICY_ON_CPU,
        quantize=options.quantize,
    )
    serve_jobs(lambda: _load(config))


if __name__ == "__main__":
    main()
