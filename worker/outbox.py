"""What one router must still get: the deciding half of a Session's writing direction.

While a frame is being written, steps go on; what they produce merges here and goes out with the next frame. Invariants
(design-details section 2):
  * Whatever the interleaving of steps and takes, the frames deliver each token once and in order (S2).
  * An end is in the frame of its sequence's last token, or alone when all tokens have gone before (S3).
  * A frame holds at most MAX_FRAME_TOKENS tokens and MAX_FRAME_BYTES bytes (S8); whoever has waited longest is first.
  * What is held is bounded by the tokens of the router's live sequences.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_FRAME_BYTES, MAX_FRAME_TOKENS
from worker.outputs import SequenceOutput

# Upper bounds of encoded sizes: the frame's own fields with its load; one run with its start; a varint.
_FRAME_BYTES = 1024
_RUN_BYTES = 96
_TOKEN_BYTES = 5
_RID_BYTES = 11


@dataclass(slots=True)
class _Run:
    """Unsent tokens of one sequence, with what goes along."""

    first_pos: int
    token_ids: list[int] = field(default_factory=list)
    start: wpb.SequenceStart | None = None
    end: wpb.SequenceEnd | None = None


@dataclass(slots=True)
class _Room:
    """What still fits into a frame."""

    tokens: int = MAX_FRAME_TOKENS
    bytes: int = MAX_FRAME_BYTES - _FRAME_BYTES


class Outbox:
    """Merges the outputs of steps into frames."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, _Run] = OrderedDict()
        self._returned: deque[int] = deque()
        self._step = 0
        self._submit_seen = 0
        self._has_news = False

    @property
    def is_empty(self) -> bool:
        """Whether `take` would return None."""
        return not (self._has_news or self._runs or self._returned)

    @property
    def submit_seen(self) -> int:
        """Serial number of the newest Submit taken in."""
        return self._submit_seen

    def holds(self, rid: int) -> bool:
        """Whether something of a sequence has not been taken."""
        return rid in self._runs

    def add(self, rid: int, output: SequenceOutput) -> None:
        """Takes a sequence's output; outputs of one sequence come in order.

        Raises:
            ValueError: its tokens do not continue those that wait here.
        """
        run = self._runs.setdefault(rid, _Run(output.first_pos))
        if run.first_pos + len(run.token_ids) != output.first_pos:
            raise ValueError(f"tokens of rid {rid} at {output.first_pos} leave a gap")
        run.token_ids.extend(output.token_ids)
        if output.start is not None:
            run.start = output.start.to_proto(rid)
        if output.end is not None:
            run.end = output.end.to_proto(rid)

    def give_back(self, rid: int) -> None:
        """The sequence has computed nothing and goes back to the router (S9)."""
        self._returned.append(rid)

    def on_step(self, step: int, submit_seen: int | None = None) -> None:
        """An engine step has passed; `submit_seen` if Submits were taken in before it."""
        self._step = step
        if submit_seen is not None:
            self._submit_seen = submit_seen
            self._has_news = True

    def take(self) -> wpb.StepOutput | None:
        """The next frame, without its load; None when there is nothing to say."""
        if self.is_empty:
            return None
        self._has_news = False
        frame = wpb.StepOutput(step=self._step, submit_seen=self._submit_seen)
        room = _Room()
        while self._runs and self._take_run(frame, room):
            pass
        while self._returned and room.bytes >= _RID_BYTES:
            frame.returned.append(self._returned.popleft())
            room.bytes -= _RID_BYTES
        return frame

    def _take_run(self, frame: wpb.StepOutput, room: _Room) -> bool:
        """Moves the oldest run into the frame, as far as it fits. True when it was moved whole."""
        rid, run = next(iter(self._runs.items()))
        # The end is paid for before any token, so that the last token never goes without it.
        fixed = _RUN_BYTES + (run.end.ByteSize() if run.end is not None else 0)
        if room.bytes < fixed:
            return False
        count = min(len(run.token_ids), room.tokens, (room.bytes - fixed) // _TOKEN_BYTES)
        whole = count == len(run.token_ids)
        if count > 0:
            _append_tokens(frame, rid, run, count)
        if whole:
            if run.end is not None:
                frame.ends.append(run.end)
            del self._runs[rid]
        room.tokens -= count
        room.bytes -= fixed + count * _TOKEN_BYTES
        return whole


def _append_tokens(frame: wpb.StepOutput, rid: int, run: _Run, count: int) -> None:
    frame.rid.append(rid)
    frame.first_pos.append(run.first_pos)
    frame.n.append(count)
    frame.token_ids.extend(run.token_ids[:count])
    if run.start is not None:
        frame.starts.append(run.start)
        run.start = None
    run.first_pos += count
    del run.token_ids[:count]
