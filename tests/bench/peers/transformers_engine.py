"""transformers as a peer, in its own venv: started by `servers.py`, speaks the lines of `runs.py`.

`generate` on batches padded on the left: a batch begins when the one before has ended whole, so that a request's time
to first token has no waiting for a place in it. `--continuous` is the library's continuous batching.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from common.cli.bench.records import Record
from common.cli.bench.workload import Work
from tests.bench.peers.runs import Clock, Job, Run, check, clock_from_now, serve_jobs

_PAD_ID = 0


class _Stamps(StoppingCriteria):
    """Records when each step's tokens are ready; stops no answer."""

    def __init__(self, clock: Clock) -> None:
        self.times: list[float] = []
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(self._clock())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def run_static(model: Any, job: Job) -> Run:
    """Batches of the job's concurrency one after the other."""
    clock = clock_from_now()
    records: list[Record] = []
    for start in range(0, len(job.works), job.concurrency):
        if clock() > job.limit_s:
            return Run(records, False)
        records += _batch(model, job.works[start : start + job.concurrency], start, clock)
    return Run(records, True)


def _batch(model: Any, works: Sequence[Work], start: int, clock: Clock) -> list[Record]:
    longest, output_tokens = max(len(work.token_ids) for work in works), works[0].output_tokens
    ids = torch.full((len(works), longest), _PAD_ID)
    mask = torch.zeros_like(ids)
    for row, work in enumerate(works):
        ids[row, longest - len(work.token_ids) :] = torch.tensor(work.token_ids)
        mask[row, longest - len(work.token_ids) :] = 1
    sent, stamps = clock(), _Stamps(clock)
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=output_tokens,
        max_new_tokens=output_tokens,
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    new = out.shape[1] - longest
    return [_record(start + row, sent, stamps.times, work, new) for row, work in enumerate(works)]


def _record(index: int, sent: float, arrivals: Sequence[float], work: Work, output_tokens: int) -> Record:
    record = Record(index, intended=sent, sent=sent, ended=arrivals[-1], arrivals=list(arrivals))
    record.input_tokens, record.output_tokens = len(work.token_ids), output_tokens
    return check(record, work)


def run_continuous(model: Any, job: Job) -> Run:
    """A closed loop over the library's own scheduler."""
    clock = clock_from_now()
    left = deque(enumerate(job.works))
    live: dict[str, tuple[Record, Work]] = {}
    records: list[Record] = []
    with model.continuous_batching_context_manager(generation_config=model.generation_config) as manager:
        while (left or live) and clock() < job.limit_s:
            while left and len(live) < job.concurrency:
                index, work = left.popleft()
                name, now = f"{index}", clock()
                live[name] = Record(index, intended=now, sent=now), work
                manager.add_request(list(work.token_ids), name, max_new_tokens=work.output_tokens, streaming=True)
            part = manager.get_result(timeout=1.0)
            if part is not None and part.request_id in live:
                _take(part, live, records, clock)
    return Run(records, not left and not live)


def _take(part: Any, live: dict[str, tuple[Record, Work]], records: list[Record], clock: Clock) -> None:
    record, work = live[part.request_id]
    if len(part.generated_tokens) > record.output_tokens:
        record.arrivals.append(clock())
        record.output_tokens = len(part.generated_tokens)
    if part.is_finished():
        record.ended, record.input_tokens = clock(), len(work.token_ids)
        records.append(check(record, work))
        del live[part.request_id]


def _load(model: str, run: Callable[[Any, Job], Run]) -> Callable[[Job], Run]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded.eval()
    # Without an end-of-sequence id no answer ends early, and `min_new_tokens` needs none.
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = _PAD_ID
    return lambda job: run(loaded, job)


def main() -> None:
    """Serves jobs until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--continuous", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    serve_jobs(lambda: _load(options.model, run_continuous if options.continuous else run_static))


if __name__ == "__main__":
    main()
