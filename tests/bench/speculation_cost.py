"""Cost of speculation on the engine thread besides the model, by part: `python -m tests.bench.speculation_cost`.

Microseconds per running sequence and step, from `schedule` to the end of `postprocess`. Scheduling is the scheduler and
the block manager alone: drafts are given, all are verified, and nothing is learnt of them. Choosing is what it takes
more to decide how many are verified and to learn from them. Proposing is prompt lookup, in steps in which it finds
nothing. Each kind of steps is measured alone, as scheduler_cost does it, and then step by step in turns with the
others, so that it finds little of its own in the processor's caches, as behind a model. Thread time, so that other
processes on the machine count little.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import statistics
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TypeAlias

import structlog
from typing_extensions import override

from common.config import Config, SpeculativeConfig
from common.params.config_parts import NGRAM
from common.params.sampling_params import SamplingParams
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.speculation.draft_controller import DraftController
from worker.engine.speculation.drafter import Proposer
from worker.engine.speculation.ngram_proposer import NgramProposer
from worker.engine.speculation.step_costs import StepCosts

Row: TypeAlias = dict[str, str | float]

MOST, RIGHT = 4, 2
PROMPT = 300
NUM_BLOCKS = 200_000
TOKEN, WRONG = 7, 8


class Given(Proposer):
    """Proposes the same drafts always, of which half are right."""

    def __init__(self) -> None:
        self._drafts = [TOKEN] * RIGHT + [WRONG] * (MOST - RIGHT)

    def propose(self, seq: Sequence, most: int) -> list[int]:
        return self._drafts if most == MOST else self._drafts[:most]


class Unweighed(DraftController):
    """Takes all drafts, and learns from none."""

    def __init__(self) -> None:
        super().__init__(MOST, adapts=False)

    @override
    def decided(self, drafts: Mapping[int, list[int]], seqs: Mapping[int, Sequence], verified: Container[int]) -> None:
        pass

    @override
    def verified(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        pass


class Trial:
    """A scheduler whose sequences all decode.

    Args:
        num_running: sequences.
        proposer: of drafts; None for no speculation.
        controller: chooses how many are verified; None for the usual one.
        repeats: whether the same token comes always; else there is nothing to be found.
    """

    def __init__(
        self, num_running: int, proposer: Proposer | None, controller: DraftController | None = None, *, repeats: bool
    ) -> None:
        self.scheduler = Scheduler(
            Config(
                num_kvcache_blocks=NUM_BLOCKS,
                enable_prefix_caching=True,
                eos_token_id=0,
                max_num_seqs=num_running,
                max_num_batched_tokens=max((1 + MOST) * num_running, 16384),
                speculative_config=None if proposer is None else SpeculativeConfig(MOST, NGRAM),
            )
        )
        drafter = self.scheduler.drafter
        drafter.proposer = proposer
        if controller is not None:
            drafter.controller = self.scheduler.postprocessor._controller = controller
        # Rows are free, so that drafts pay, and steps are long, so that there is always a look at them.
        drafter.controller.costs = StepCosts({1: 1e3, 100_000: 1e3})
        self._rnd, self._repeats, self._num_running = random.Random(1), repeats, num_running
        params = SamplingParams(max_tokens=100_000)
        prompts = ([i, *self._tokens(PROMPT - 1)] for i in range(num_running))
        self.scheduler.add_group(Sequence(prompt, 16, params) for prompt in prompts)
        while self.step()[0].total_seqs_num_decode < num_running:
            pass

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._rnd.randrange(9, 1 << 30) for _ in range(count))

    def step(self) -> tuple[ScheduledBatch, float]:
        """A step, and its microseconds per sequence without the model's."""
        start = time.thread_time()
        scheduled = self.scheduler.schedule(0.0)
        middle = time.thread_time()
        assert scheduled is not None
        batch, seqs = scheduled
        output = ScheduledBatchOutput(
            {
                seq_id: (TOKEN,) * (1 + RIGHT * (seq_id in batch.scheduled_spec_decode_tokens))
                if self._repeats
                else self._tokens(1)
                for seq_id, final in zip(batch.req_ids, batch.is_final, strict=True)
                if final
            }
        )
        resumed = time.thread_time()
        self.scheduler.record_step(batch, 1e3)
        self.scheduler.postprocess(seqs.values(), output, batch=batch, now=0.0)
        self.scheduler.take_outputs()
        return batch, 1e6 * (time.thread_time() - resumed + middle - start) / self._num_running


def measure(num_running: int, num_steps: int) -> list[Row]:
    """Prints a line for each way: medians over steps of each kind."""
    trials = {
        "plain": Trial(num_running, None, repeats=True),
        "given": Trial(num_running, Given(), Unweighed(), repeats=True),
        "chosen": Trial(num_running, Given(), repeats=True),
        "looked up": Trial(num_running, NgramProposer(2, 4), repeats=False),
    }
    # As in a worker, which collects garbage between steps.
    gc.collect()
    gc.freeze()
    gc.disable()
    alone = {name: [trial.step()[1] for _ in range(num_steps)] for name, trial in trials.items()}
    in_turns: dict[str, list[float]] = {name: [] for name in trials}
    for _ in range(num_steps):
        for name, trial in trials.items():
            in_turns[name].append(trial.step()[1])
    gc.enable()
    return [tell(num_running, "alone", alone), tell(num_running, "in turns", in_turns)]


def tell(num_running: int, way: str, found: dict[str, list[float]]) -> Row:
    """Prints the line of one way."""
    us = {name: statistics.median(each) for name, each in found.items()}
    row: Row = {
        "running": str(num_running),
        "way": way,
        "plain": round(us["plain"], 2),
        "scheduling": round(us["given"], 2),
        "a token": round(us["given"] / (1 + RIGHT), 2),
        "with blocks": round(statistics.mean(found["given"]), 2),
        "choosing": round(us["chosen"] - us["given"], 2),
        "proposing": round(us["looked up"] - us["plain"], 2),
    }
    print(
        f"{num_running:4} decodes, {way}: scheduling {row['plain']} us without speculation, {row['scheduling']} with "
        f"{MOST} drafts of which {RIGHT} are right, {row['a token']} a token, {row['with blocks']} in the mean with "
        f"the steps that fill blocks; choosing {row['choosing']}, proposing {row['proposing']}",
        flush=True,
    )
    return row


def main() -> None:
    """Prints two lines for each number of sequences."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256], help="sequences that decode")
    parser.add_argument("--steps", type=int, default=300, help="of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    options = parser.parse_args()
    rows = [row for running in options.running for row in measure(running, options.steps)]
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
