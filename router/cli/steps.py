"""`fissile steps`: shows the newest steps of a worker's engine, from its flight recorder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
from fissile.admin.v1 import admin_pb2 as apb
from fissile.worker.v1 import worker_pb2 as wpb

from common.cli.core import output
from common.cli.core.options import argument, options
from common.cli.core.step_dumps import read_steps
from router.cli.connection import Admin, with_admin

_HEADINGS: Final = ("STEP", "START", "MS", "DECODE", "VERIFY", "PREFILL", "NEW", "KV", "WAITING", "LOST")
_OF_REQUEST: Final = "REQUEST"
_TIME: Final = "TIME"
_KINDS: Final = {
    wpb.STEP_ROW_KIND_DECODE: "decode",
    wpb.STEP_ROW_KIND_VERIFY: "verify",
    wpb.STEP_ROW_KIND_PREFILL: "prefill",
}
# Characters of the longest step's bar, and those of its parts.
_BAR: Final = 40
_PARTS: Final = (("░", "schedule_us"), ("▒", "launch_us"), ("█", "wait_us"))


def as_table(steps: Sequence[wpb.Step], request_id: str = "") -> str:
    """The steps as aligned columns with headings and a bar each; one line if there are none.

    Args:
        steps: oldest first.
        request_id: of the request whose part in each step has a column of its own; empty for none.
    """
    if not steps:
        return "no step is recorded" + (f" of request {request_id}" if request_id else "")
    longest = max(map(duration_us, steps))
    headings = (*_HEADINGS, *((_OF_REQUEST,) if request_id else ()), _TIME)
    return output.aligned([headings, *(_row(step, longest, request_id) for step in steps)])


def duration_us(step: wpb.Step) -> int:
    """Microseconds from the step's start until its output arrived, or until now."""
    return step.schedule_us + step.launch_us + step.wait_us


def _row(step: wpb.Step, longest: int, request_id: str) -> tuple[str, ...]:
    used = step.total_blocks - step.free_blocks
    of_request = (_part_of(step, request_id),) if request_id else ()
    return (
        str(step.number),
        datetime.fromtimestamp(step.start_us / 1e6, UTC).strftime("%H:%M:%S.%f")[:-3],
        f"{duration_us(step) / 1000:.1f}" + ("+" if step.in_flight else ""),
        _count(step, wpb.STEP_ROW_KIND_DECODE, has_tokens=False),
        _count(step, wpb.STEP_ROW_KIND_VERIFY),
        _count(step, wpb.STEP_ROW_KIND_PREFILL),
        "-" if step.in_flight else str(step.new_tokens),
        f"{used / step.total_blocks:.0%}" if step.total_blocks else "-",
        str(step.waiting_seqs + step.gated_seqs),
        str(len(step.preempted)),
        *of_request,
        _bar(step, longest),
    )


def _count(step: wpb.Step, kind: wpb.StepRowKind.ValueType, *, has_tokens: bool = True) -> str:
    """Number of the step's sequences of one kind, and their tokens."""
    tokens = [row.tokens for row in step.rows if row.kind == kind]
    if not tokens:
        return "-"
    return f"{len(tokens)}: {sum(tokens)}" if has_tokens else str(len(tokens))


def _part_of(step: wpb.Step, request_id: str) -> str:
    """A request's part of the step: kind, tokens, and the position of the first one."""
    rows = [row for row in step.rows if row.request_id == request_id]
    return ", ".join(f"{_KINDS.get(row.kind, '?')} {row.tokens} at {row.computed_tokens}" for row in rows) or "-"


def _bar(step: wpb.Step, longest: int) -> str:
    """A bar as long as the step took, in three parts; a step has at least one character."""
    ends, done = [], 0
    for _, name in _PARTS:
        done += getattr(step, name)
        ends.append(round(_BAR * done / max(1, longest)))
    starts = [0, *ends]
    bar = "".join(sign * (end - start) for (sign, _), start, end in zip(_PARTS, starts, ends, strict=False))
    return bar or _PARTS[-1][0]


def newest(admin: Admin, worker: str, last: int, request_id: str) -> list[wpb.Step]:
    """The last steps of a worker, oldest first, page after page.

    Raises:
        CommandError: a call failed.
    """
    found: list[wpb.Step] = []
    while len(found) < last:
        before = found[0].number if found else 0
        wanted = apb.ListStepsRequest(worker_id=worker, last=last - len(found), request_id=request_id, before=before)
        page: apb.ListStepsResponse = admin.ask(lambda stub: stub.ListSteps, wanted)
        if not page.steps:
            break
        found[:0] = page.steps
    return found


def newest_of_dump(dump: Path, last: int, request_id: str) -> list[wpb.Step]:
    """The last steps of a dump, oldest first.

    Raises:
        CommandError: the file is no dump.
    """
    wanted = [
        step for step in read_steps(dump) if not request_id or any(row.request_id == request_id for row in step.rows)
    ]
    return wanted[-last:]


@click.command()
@argument("worker", required=False)
@options("steps")
@with_admin
def steps(worker: str | None, admin: Admin, last: int, request_id: str, dump: Path | None, as_json: bool) -> None:
    """Show the newest steps of WORKER, a name in the first column of `fissile workers`, or of a file.

    A worker remembers some thousand steps, also those in flight: a step that hangs is the last line, with a + behind
    its time. With --request, only steps that computed this request are shown, and REQUEST says what they computed of
    it: the kind, the number of tokens, and the position of the first one.

    START is UTC. DECODE counts sequences that get their next token; VERIFY those that also check drafts, and their
    tokens; PREFILL prompts, and their tokens. A step with a long PREFILL makes every DECODE beside it wait. NEW are the
    tokens that answers got, KV is the part of the blocks in use, WAITING the sequences that had to wait, LOST those
    that were preempted and are computed again.

    TIME is a bar as long as the step took: ░ choosing the batch, ▒ launching it (where the next step is chosen
    meanwhile, that too; in a worker without ranks on a CPU, computing it), █ waiting for its output.

    --file FILE shows a dump that a worker wrote (--step-dumps), or the output of --json, and needs no router.

    --json prints a step per line. `fissile replay-step` computes such a line again under a profiler.
    """
    if worker and dump is None:
        found = newest(admin, worker, last, request_id)
    elif dump is not None and not worker:
        found = newest_of_dump(dump, last, request_id)
    else:
        raise click.UsageError("give WORKER or --file FILE" + (", not both" if worker else ""))
    if as_json:
        for step in found:
            click.echo(json.dumps(output.as_fields(step), ensure_ascii=False))
        return
    click.echo(as_table(found, request_id))
