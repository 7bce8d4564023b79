"""`fissile replay-step`: computes a recorded step again under PyTorch's profiler.

The step has the same sequences as the recorded one, with as many tokens and as long a context each. Its token ids are
random, all sequences are greedy, and the KV cache holds no context that was computed: none of this changes the work,
except where the choice of experts or a vocabulary's masks depend on tokens.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from fissile.worker.v1 import worker_pb2 as wpb

from common.cli.core import output
from common.cli.core.errors import CommandError
from common.cli.core.options import argument, options
from common.cli.core.step_dumps import read_steps
from common.errors import ApiError
from common.params.options.option import FILE
from common.params.sampling_params import SamplingParams
from common.telemetry.logs import LEVEL_VARIABLE, setup_logging
from worker.cli.worker_options import engine_options
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.block_manager import BlockManager
from worker.engine.sequence import Sequence as EngineSequence
from worker.engine.sequence import SequenceType
from worker.engine.step import Step
from worker.engine_factory import EngineOptions, build_engine
from worker.progress import StartProgress

if TYPE_CHECKING:
    from worker.model.step_profile import OperatorTime

_MOST_SHOWN: Final = 10


def choose_step(steps: Sequence[wpb.Step], number: int | None) -> wpb.Step:
    """The step with this number; for None the oldest one in flight, or else the one that took longest.

    Raises:
        CommandError: no step has the number, or the chosen one has no sequences.
    """
    if number is None:
        hanging = [step for step in steps if step.in_flight]
        chosen = hanging[0] if hanging else max(steps, key=_recorded_us)
    else:
        by_number = {step.number: step for step in steps}
        if number not in by_number:
            raise CommandError(f"--step {number} is not in the dump, which has {steps[0].number} to {steps[-1].number}")
        chosen = by_number[number]
    if not chosen.rows:
        raise CommandError(f"step {chosen.number} has no sequences; choose another with --step")
    return chosen


def make_batch(
    step: wpb.Step, later: Sequence[wpb.Step], blocks: BlockManager, vocab_size: int, max_model_len: int
) -> ScheduledBatch:
    """A batch of the step's make-up, with random token ids.

    Args:
        step: recorded.
        later: the steps after it, which say whether a prompt goes on.
        blocks: get the blocks of its sequences.
        vocab_size: token ids are below it.
        max_model_len: most tokens of a sequence.

    Raises:
        CommandError: a sequence is too long, or the KV cache has too few blocks.
    """
    ids = random.Random(step.number)
    goes_on = {row.sequence for each in later for row in each.rows if row.kind == wpb.STEP_ROW_KIND_PREFILL}
    made = Step(sum(row.tokens for row in step.rows), 0.0)
    drafts: dict[int, list[int]] = {}
    for row in step.rows:
        is_prefill = row.kind == wpb.STEP_ROW_KIND_PREFILL
        num_tokens = row.tokens if is_prefill else 1
        # A chunk that is not the last of its prompt samples no token.
        length = row.computed_tokens + num_tokens + (is_prefill and row.sequence in goes_on)
        if row.computed_tokens + row.tokens >= max_model_len:
            raise CommandError(
                f"step {step.number} has a sequence of {row.computed_tokens + row.tokens} tokens; the engine takes "
                f"{max_model_len - 1}: give a larger --max-model-len or --kv-cache-memory"
            )
        seq = EngineSequence(
            [ids.randrange(vocab_size) for _ in range(length)],
            blocks.block_size,
            SamplingParams(temperature=0.0, max_tokens=max_model_len - length, ignore_eos=True),
        )
        seq.length_limit = max_model_len
        num_drafts = 0 if is_prefill else row.tokens - 1
        if not blocks.can_allocate(seq, [], -(-num_drafts // blocks.block_size)):
            raise CommandError(
                f"the sequences of step {step.number} need more than the {blocks.num_blocks} blocks of the KV cache: "
                "give a larger --kv-cache-memory"
            )
        blocks.allocate(seq, [])
        seq.num_computed_tokens = row.computed_tokens
        made.add(seq, num_tokens, SequenceType.PREFILL if is_prefill else SequenceType.DECODE)
        if num_drafts:
            blocks.may_append(seq, row.tokens)
            drafts[seq.id] = [ids.randrange(vocab_size) for _ in range(num_drafts)]
    if drafts:
        made.verify(drafts)
    return made.build()


def as_table(operators: Sequence[OperatorTime]) -> str:
    """The first operators as aligned columns with headings."""
    headings = ("OPERATOR", "CALLS", "SELF MS", "PART")
    shown = [(each.name, str(each.calls), f"{1000 * each.self_s:.3f}", f"{each.part:.0%}") for each in operators]
    return output.aligned([headings, *shown[:_MOST_SHOWN]])


def _recorded_us(step: wpb.Step) -> int:
    return step.schedule_us + step.launch_us + step.wait_us


@click.command("replay-step", context_settings={"help_option_names": ["-h", "--help"]})
@argument("dump", type=FILE)
@options("replay-step")
def replay_step(dump: Path, step: int | None, trace: Path, **engine: Any) -> None:
    """Compute a step of DUMP again, under PyTorch's profiler.

    DUMP is a file of a worker's --step-dumps, or the output of `fissile steps --json`. Give the worker's --model and
    those of its options that say how it computes. The step has the same sequences, tokens and contexts; the token ids
    are random, since a dump has none.

    Prints how long the step took then and takes now, and the ten operators that take most time by themselves; writes a
    trace, which https://ui.perfetto.dev and chrome://tracing open. On a CPU the native kernels of all layers are one
    call, fissile_decoder.

    Steps of draft models and of other ranks are not computed.
    """
    setup_logging(os.environ.get(LEVEL_VARIABLE, "warning"), service="replay-step")
    # Showing the help needs no PyTorch.
    from worker.model.step_profile import forward_s, profile_step  # noqa: PLC0415

    steps = read_steps(dump)
    chosen = choose_step(steps, step)
    later = [each for each in steps if each.number > chosen.number]
    num_tokens = sum(row.tokens for row in chosen.rows)
    made = engine_options({**engine, "max_num_seqs": len(chosen.rows), "max_num_batched_tokens": num_tokens})
    try:
        model_config = ModelConfig.from_folder(made.config.model)
        config = with_special_tokens(made.config, model_config)
        core = build_engine(EngineOptions(config, model_config, threads=made.threads), StartProgress()).core
    except (ApiError, ModelError) as error:
        raise CommandError(str(error)) from error
    try:
        scheduler = core.scheduler
        limit = scheduler.limits.max_model_len
        batch = make_batch(chosen, later, scheduler.block_manager, model_config.vocab_size, limit)
        now_s = forward_s(core.runner, batch)
        operators = profile_step(core.runner, batch, trace)
    except OSError as error:
        raise CommandError(f"--trace {trace} cannot be written: {error}") from None
    finally:
        core.close()
    then = "it had not ended" if chosen.in_flight else f"its forward pass took {chosen.forward_us / 1000:.2f} ms"
    counts = f"{batch.total_seqs_num_decode} decodes, {batch.total_seqs_num_prefill} prompts, {num_tokens} tokens"
    click.echo(f"step {chosen.number}: {counts}\n{then}; here it takes {1000 * now_s:.2f} ms (median of several)\n")
    click.echo(f"{as_table(operators)}\n\nthe trace is in {trace}")
