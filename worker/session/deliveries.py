"""Routes engine outputs to their sequences' owners, on the event loop.

Invariant: every added sequence gets exactly one output with an end, also when the engine fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Protocol

from common.process.tasks import run_guarded
from worker.engine.outputs import End, RequestOutput, sequence_times
from worker.engine.sequence import EndReason, Sequence
from worker.engine.turns import StepListener, Turn


class OwnedSequence(Protocol):
    """Record of a sequence in the engine, on the event loop's side.

    Attributes:
        seq: belongs to the engine while it is live.
        end_pos: number of tokens so far, including the prompt.
        owner: is notified of steps with output.
    """

    seq: Sequence
    end_pos: int

    @property
    def owner(self) -> StepListener:
        """The object that is notified of steps with output."""
        ...

    def on_output(self, output: RequestOutput) -> None:
        """Takes the sequence's output of one step."""
        ...


class Deliveries:
    """The live sequences, by the ids that outputs have."""

    def __init__(self) -> None:
        self._live: dict[int, OwnedSequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._live

    def add(self, live: Iterable[OwnedSequence]) -> None:
        """Adds sequences, which get their outputs from now on."""
        for each in live:
            self._live[each.seq.id] = each

    def deliver(self, turn: Turn) -> None:
        """Delivers a turn's outputs; each owner is notified once per step."""
        concerned: dict[StepListener, int | None] = {}
        for output in turn.outputs:
            concerned.setdefault(self._hand_out(output))
        for seq_id, phase in turn.phases.items():
            if (live := self._live.get(seq_id)) is not None:
                live.on_output(RequestOutput(seq_id, [], first_pos=live.end_pos, phase=phase))
                concerned.setdefault(live.owner)
        concerned.update((receipt.listener, receipt.serial) for receipt in turn.seen)
        for listener, submit_seen in concerned.items():
            listener.on_step(turn.step, submit_seen)

    def end_all(self, step: int, message: str, now: float) -> None:
        """Ends every live sequence with EndReason.ERROR after a failure of the engine.

        A sequence that raises does not affect the others: it may be why the engine failed.
        """
        owners: dict[StepListener, None] = {}
        for live in list(self._live.values()):
            live.seq.leave_time = now
            end = End(live.end_pos, EndReason.ERROR, message=message, times=sequence_times(live.seq))
            owners[live.owner] = None
            output = RequestOutput(live.seq.id, [], True, None, live.end_pos, end=end)
            run_guarded("delivery", partial(self._hand_out, output), sequence=live.seq.id)
        for owner in owners:
            run_guarded("delivery", partial(owner.on_step, step, None))
        self._live.clear()

    def _hand_out(self, output: RequestOutput) -> StepListener:
        live = self._live[output.request_id]
        # Before removal: a sequence whose owner raises stays live and gets its end from `end_all`.
        live.on_output(output)
        live.end_pos = output.first_pos + len(output.output_tokens)
        if output.end is not None:
            del self._live[output.request_id]
        return live.owner
