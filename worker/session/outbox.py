"""Output that one router must still get. Pure: the deciding half of a Session's writing direction.

Steps continue while a frame is being written; their output merges here and is sent in the next frame. A stream that
breaks loses the frames on their way. Their tokens stay here, and `rewind` sends them again. Invariants
(docs/explanation/architecture.md):
  * Whatever the order of steps and takes, the frames deliver each token once and in order (S2); after a rewind, from
      the position that the router names.
  * An end is in the frame of its sequence's last token, or alone if all tokens were sent before (S3).
  * A token's logprobs, and its vector, are in its frame. Logprobs of prompt tokens are sent before the first token, and
      again with it.
  * A frame holds at most MAX_FRAME_TOKENS tokens and MAX_FRAME_BYTES bytes (S8). The sequence that has waited longest
      is first.
  * Memory is bounded by the tokens of the router's live sequences, and by MAX_TAILS sequences and MAX_TAIL_TOKENS
      tokens of ended ones that have been sent whole (S6). The oldest of those is dropped first, and is unknown from
      then on.
  * Logprobs (up to 700 bytes per token) and digests of a live sequence are dropped when MAX_SENT_LOGPROBS later tokens
      have been sent. Sent data may still be lost in a buffer, because only a Hello acknowledges (S4). A router that
      asks for older ones is told that the sequence is unknown, and submits it anew after its tokens (S5). Nothing is
      lost; the bound only decides what a broken stream costs. A sequence seldom gets so many tokens within a lease.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from fissile.worker.v1 import worker_pb2 as wpb

from common.limits import MAX_FRAME_BYTES, MAX_FRAME_TOKENS, MAX_SENT_LOGPROBS, MAX_TAIL_TOKENS, MAX_TAILS
from worker.engine.outputs import GivenLogprobs, RequestOutput
from worker.session.adoption import AdoptionFacts
from worker.session.output_protos import end_proto, phase_proto, start_proto

# Upper bounds of encoded sizes: the frame's own fields with its load; one run with its start; a varint; logprob
# fields without their rows.
_FRAME_BYTES = 1024
_RUN_BYTES = 96
_ROWS_BYTES = 32
_TOKEN_BYTES = 5
_DIGEST_BYTES = 13
_RID_BYTES = 11
# Ends of complete answers.
_FINISHES = (
    wpb.END_REASON_EOS,
    wpb.END_REASON_STOP_TOKEN,
    wpb.END_REASON_STOP_SEQUENCE,
    wpb.END_REASON_LENGTH,
)


@dataclass(slots=True)
class OutboxRun:
    """Output of one sequence, from absolute position `first_pos` on.

    `sent` of its tokens have been sent. `logprobs` has `width` bytes per token, without the first `num_dropped` tokens;
    likewise `given` for prompt tokens from `given_pos` on, in bytes.
    """

    first_pos: int
    adoptable: AdoptionFacts | None = None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    sent: int = 0
    # Another router has adopted the sequence; it gets the start with its first tokens.
    owes_start: bool = False
    start: wpb.SequenceStart | None = None
    end: wpb.SequenceEnd | None = None
    # Digests of logits, by absolute position of the token.
    digests: dict[int, int] = field(default_factory=dict)
    logprobs: bytearray = field(default_factory=bytearray)
    width: int = 0
    num_dropped: int = 0
    given: bytearray = field(default_factory=bytearray)
    given_pos: int = 0
    given_width: int = 0
    given_sent: int = 0
    pooled: bytes = b""
    # The stage that the sequence has entered last.
    phase: wpb.SequencePhase | None = None
    owes_phase: bool = False

    @property
    def end_pos(self) -> int:
        """Number of tokens so far, including the prompt."""
        return self.first_pos + len(self.token_ids)

    def reaches(self, have: int) -> bool:
        """True if all output after the first `have` tokens is here."""
        return self.first_pos + self.num_dropped <= have <= self.end_pos

    def add_given(self, given: GivenLogprobs) -> None:
        """Adds logprobs of prompt tokens, which arrive in order."""
        if not self.given:
            self.given_pos, self.given_width = given.first_pos, given.width
        self.given += given.rows

    def rows(self, start: int, end: int) -> bytes:
        """Logprobs of the tokens from index `start` to `end`."""
        return bytes(self.logprobs[(start - self.num_dropped) * self.width : (end - self.num_dropped) * self.width])

    def drop_sent(self) -> None:
        """Drops logprobs and digests far before the last sent token; in large pieces, because each drop copies the
        rest."""
        count = self.sent - self.num_dropped - MAX_SENT_LOGPROBS
        if count < MAX_SENT_LOGPROBS or not (self.width or self.given or self.digests):
            return
        del self.logprobs[: count * self.width]
        self.given.clear()
        self.given_sent = 0
        self.num_dropped += count
        oldest = self.first_pos + self.num_dropped
        self.digests = {position: digest for position, digest in self.digests.items() if position >= oldest}

    @property
    def weight(self) -> int:
        """Memory, in units of tokens."""
        return len(self.token_ids) + (len(self.logprobs) + len(self.given) + len(self.pooled)) // _TOKEN_BYTES


@dataclass(slots=True)
class _Room:
    """Room left in a frame."""

    tokens: int = MAX_FRAME_TOKENS
    bytes: int = MAX_FRAME_BYTES - _FRAME_BYTES


class Outbox:
    """Merges the outputs of steps into frames."""

    def __init__(self) -> None:
        self._runs: dict[int, OutboxRun] = {}
        # rids with unsent output, the longest waiting first.
        self._unsent: OrderedDict[int, None] = OrderedDict()
        # rids of ended sequences that have been sent whole, the oldest first.
        self._tails: OrderedDict[int, None] = OrderedDict()
        self._tail_tokens = 0
        self._returned: deque[int] = deque()
        self._step = 0
        self._submit_seen = 0
        self._has_news = False

    @property
    def is_empty(self) -> bool:
        """True if `take` would return None."""
        return not (self._has_news or self._unsent or self._returned)

    @property
    def submit_seen(self) -> int:
        """Serial number of the newest Submit that the engine has taken in."""
        return self._submit_seen

    @property
    def num_unsent(self) -> int:
        """Number of sequences with unsent output."""
        return len(self._unsent) + len(self._returned)

    @property
    def rids(self) -> list[int]:
        """Sequences with output here, sent or not."""
        return list(self._runs)

    def holds(self, rid: int) -> bool:
        """True if the sequence has output here, sent or not."""
        return rid in self._runs

    def add(self, rid: int, output: RequestOutput, adoptable: AdoptionFacts | None = None) -> None:
        """Adds a sequence's output, in order; its first one may say how it can be adopted.

        Raises:
            ValueError: its tokens do not continue the ones here.
        """
        run = self._runs.setdefault(rid, OutboxRun(output.first_pos, adoptable))
        if run.end_pos != output.first_pos:
            raise ValueError(f"tokens of rid {rid} at {output.first_pos} leave a gap")
        run.token_ids.extend(output.output_tokens)
        if output.logit_digests:
            run.digests.update(output.logit_digests)
        if output.logprobs:
            run.width = len(output.logprobs) // len(output.output_tokens)
            run.logprobs += output.logprobs
        if output.given is not None:
            run.add_given(output.given)
        run.pooled = run.pooled or output.pooled
        if output.start is not None:
            run.start = start_proto(rid, output.start)
        if output.phase is not None:
            run.phase, run.owes_phase = phase_proto(rid, output.phase), True
        if output.end is not None:
            run.end = end_proto(rid, output.end)
        self._unsent.setdefault(rid)

    def adoptables(self) -> list[tuple[bytes, int]]:
        """Adoption keys and rids of the adoptable sequences with output here."""
        return [(run.adoptable.key, rid) for rid, run in self._runs.items() if run.adoptable is not None]

    def release(self, rid: int, have: int, digest: bytes) -> OutboxRun | None:
        """Removes a sequence for a router that adopts it. None, and it stays, unless it can continue after `have`
        tokens.

        `digest` is that of the generated ones among the client's first `have` tokens. A sequence that was given up
        stays too.
        """
        run = self._runs[rid]
        if run.adoptable is None or not run.reaches(have) or not run.adoptable.is_behind(run.token_ids, have, digest):
            return None
        if run.end is not None and run.end.reason not in _FINISHES:
            return None
        self.forget(rid)
        return run

    def take_in(self, rid: int, run: OutboxRun, have: int) -> None:
        """Adds a sequence that another outbox has released, under another rid; its output after `have` tokens is
        unsent."""
        for told in (run.start, run.end, run.phase):
            if told is not None:
                told.rid = rid
        if run.phase is not None:
            # Time of the other router.
            del run.phase.parts[:]
        if run.start is not None:
            # Nothing has been computed for this router.
            run.start.queue_us = run.start.prefill_us = 0
            run.owes_start = True
        self._runs[rid] = run
        self.rewind(rid, have)

    def rewind(self, rid: int, have: int) -> bool:
        """Sends everything after the router's first `have` tokens again. False if that is not possible (S4)."""
        run = self._runs.get(rid)
        if run is None or not run.reaches(have):
            return False
        if rid in self._tails:
            self._leave_tails(rid)
        run.sent = have - run.first_pos
        run.owes_phase = run.phase is not None
        if not run.sent:
            run.given_sent = 0
        if run.end is not None or have < run.end_pos or run.given_sent < len(run.given):
            self._unsent.setdefault(rid)
        else:
            self._unsent.pop(rid, None)
        return True

    def forget(self, rid: int) -> None:
        """Drops a sequence that the router does not want."""
        if rid in self._tails:
            self._leave_tails(rid)
        self._unsent.pop(rid, None)
        self._runs.pop(rid, None)

    def acknowledge(self, rid: int) -> None:
        """Drops an ended sequence that has been sent whole; a no-op for any other."""
        if rid in self._tails:
            self.forget(rid)

    def begin_stream(self) -> None:
        """Resets per-stream state: sequences given back on the last stream are unknown, and its Submits no longer
        count."""
        self._returned.clear()
        self._submit_seen = 0
        self._has_news = False

    def give_back(self, rid: int) -> None:
        """Returns a sequence that has computed nothing to the router (S9)."""
        self._returned.append(rid)

    def on_step(self, step: int, submit_seen: int | None = None) -> None:
        """Notes an engine step; `submit_seen` if the engine took in Submits before it."""
        self._step = step
        if submit_seen is not None:
            self._submit_seen = submit_seen
            self._has_news = True

    def take(self) -> wpb.StepOutput | None:
        """The next frame, without its load; None if there is nothing to send."""
        if self.is_empty:
            return None
        self._has_news = False
        frame = wpb.StepOutput(step=self._step, submit_seen=self._submit_seen)
        room = _Room()
        while self._unsent and self._take_run(frame, room):
            pass
        while self._returned and room.bytes >= _RID_BYTES:
            frame.returned.append(self._returned.popleft())
            room.bytes -= _RID_BYTES
        return frame

    def _take_run(self, frame: wpb.StepOutput, room: _Room) -> bool:
        """Moves the oldest run into the frame, as far as it fits. True if it was moved whole."""
        rid = next(iter(self._unsent))
        run = self._runs[rid]
        # The end's size is reserved before any token, so that the last token is never sent without it.
        phase = run.phase if run.owes_phase and run.end is None else None
        told = sum(each.ByteSize() for each in (run.end, phase) if each is not None)
        fixed = _RUN_BYTES + _ROWS_BYTES + len(run.pooled) + told
        if room.bytes < fixed or not _take_given(frame, rid, run, room, fixed):
            return False
        unsent = len(run.token_ids) - run.sent
        token_bytes = _TOKEN_BYTES + run.width + (_DIGEST_BYTES if run.digests else 0)
        count = min(unsent, room.tokens, (room.bytes - fixed) // token_bytes)
        whole = count == unsent
        if count > 0:
            _append_tokens(frame, rid, run, count)
        room.tokens -= count
        room.bytes -= fixed + count * token_bytes
        if phase is not None:
            frame.phases.append(phase)
            run.owes_phase = False
        if whole:
            del self._unsent[rid]
            if run.end is not None:
                frame.ends.append(run.end)
                self._keep_tail(rid, run)
        return whole

    def _keep_tail(self, rid: int, run: OutboxRun) -> None:
        """Keeps a sequence that has been sent whole, because the frame may be lost. Cancelled ones are not kept: no
        router asks for them."""
        if run.end is not None and run.end.reason == wpb.END_REASON_CANCELLED:
            del self._runs[rid]
            return
        self._tails[rid] = None
        self._tail_tokens += run.weight
        while len(self._tails) > MAX_TAILS or self._tail_tokens > MAX_TAIL_TOKENS:
            self.forget(next(iter(self._tails)))

    def _leave_tails(self, rid: int) -> None:
        del self._tails[rid]
        self._tail_tokens -= self._runs[rid].weight


def _take_given(frame: wpb.StepOutput, rid: int, run: OutboxRun, room: _Room, kept: int) -> bool:
    """Moves logprobs of prompt tokens into the frame as far as they fit beside `kept` bytes. True if all were moved."""
    left = len(run.given) - run.given_sent
    if not left:
        return True
    taken = min(left, (room.bytes - kept - _ROWS_BYTES) // run.given_width * run.given_width)
    if taken > 0:
        first_pos = run.given_pos + run.given_sent // run.given_width
        rows = bytes(run.given[run.given_sent : run.given_sent + taken])
        frame.given_logprobs.add(rid=rid, first_pos=first_pos, rows=rows)
        run.given_sent += taken
        room.bytes -= taken + _ROWS_BYTES
    return run.given_sent == len(run.given)


def _append_tokens(frame: wpb.StepOutput, rid: int, run: OutboxRun, count: int) -> None:
    frame.rid.append(rid)
    frame.first_pos.append(run.first_pos + run.sent)
    frame.n.append(count)
    frame.token_ids.extend(run.token_ids[run.sent : run.sent + count])
    if run.digests:
        digested = range(run.first_pos + run.sent, run.first_pos + run.sent + count)
        found = {position: run.digests[position] for position in digested if position in run.digests}
        frame.logit_digests.add(rid=rid, positions=found.keys(), digests=found.values())
    if run.pooled:
        frame.pooled.add(rid=rid, values=run.pooled)
    if run.start is not None and (run.sent == 0 or run.owes_start):
        frame.starts.append(run.start)
        run.owes_start = False
    if run.width:
        rows = run.rows(run.sent, run.sent + count)
        frame.logprobs.add(rid=rid, first_pos=run.first_pos + run.sent, rows=rows)
    run.sent += count
    run.drop_sent()
