"""Assembles a Session's frames into groups of sequences. Pure: the deciding half of the reading direction.

Invariants:
  * A group enters the engine as a whole, once, in the order in which groups were completed: with its last Submit and
      the last Extend of each of its sequences (docs/explanation/architecture.md). A refused, cancelled or late sequence
      leaves its group and does not affect the others.
  * A Submit of a known rid does nothing (S5); an Extend or Cancel of an unknown rid is ignored.
  * Memory is bounded: a prompt by the model's length, all prompts by MAX_ASSEMBLING_TOKENS, their records by
      MAX_ASSEMBLING_BYTES, groups by MAX_OPEN_GROUPS. A router that keeps to the protocol has one open group.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.errors import ApiError
from common.limits import (
    MAX_ASSEMBLING_BYTES,
    MAX_ASSEMBLING_TOKENS,
    MAX_OPEN_GROUPS,
    MAX_REQUEST_ID_BYTES,
    MAX_TENANT_BYTES,
)
from common.params.sampling_params import SamplingParams
from common.rpc.unsupported_fields import refuse_unlisted
from common.wire.heads import told_pooling
from worker.engine.sequence import EndReason, Sequence
from worker.session import request_validation
from worker.session.sequence_builder import EngineLimits, build_sequence, check_length, check_sequence

# Memory of a sequence's objects here, besides the bytes of its record.
_DRAFT_BYTES = 512
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """A complete sequence, with the trace context of its router's span and its adoption key."""

    rid: int
    seq: Sequence
    traceparent: str
    tracestate: str
    adoption_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that does not enter the engine: its rid, its tokens so far, and the reason."""

    rid: int
    end_pos: int
    reason: EndReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Sequences that enter the waiting queue together."""

    serial: int
    arrivals: list[Arrival]


@dataclass(slots=True)
class _Draft:
    """A sequence that is being assembled."""

    record: wpb.SubmitSequence
    params: SamplingParams
    token_ids: array[int]
    more: bool
    arrived: float
    deadline: float | None
    num_bytes: int


@dataclass(slots=True)
class _OpenGroup:
    """A group that is being assembled; `drafts` in order of service."""

    drafts: dict[int, _Draft] = field(default_factory=dict)
    more: bool = True

    @property
    def is_complete(self) -> bool:
        return not self.more and not any(draft.more for draft in self.drafts.values())


class Inbox:
    """Assembles the groups of one Session.

    Args:
        limits: of the engine.
        is_live: True if a rid of this Session runs already, or its end has not been written.
    """

    def __init__(self, limits: EngineLimits, is_live: Callable[[int], bool]) -> None:
        self._limits = limits
        self._is_live = is_live
        self._open: dict[int, _OpenGroup] = {}
        self._serials: dict[int, int] = {}
        self._num_tokens = self._num_bytes = 0
        # Lower bound of the deadlines of all sequences here.
        self._earliest = math.inf
        self._groups: list[SequenceGroup] = []
        self._refusals: dict[int, Refusal] = {}

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of the sequences that are being assembled."""
        return self._num_bytes + _TOKEN_BYTES * self._num_tokens

    @property
    def num_seqs(self) -> int:
        """Number of sequences that are being assembled."""
        return len(self._serials)

    def submit(self, frame: wpb.Submit, now: float) -> None:
        """Adds the sequences of a Submit; `now` is when it was read, monotonic seconds.

        Raises:
            ApiError: the Session must be closed because it holds too much.
        """
        group = self._open_group(frame.serial)
        for record in frame.seqs:
            if self._is_known(record.rid):
                continue
            try:
                draft = self._draft(record, now)
            except ApiError as error:
                self._refuse(record.rid, len(record.token_ids), str(error))
                continue
            group.drafts[record.rid] = draft
            self._serials[record.rid] = frame.serial
            if draft.deadline is not None:
                self._earliest = min(self._earliest, draft.deadline)
            self._count(len(draft.token_ids), draft.num_bytes)
        group.more = frame.more
        self._complete(frame.serial)

    def extend(self, frame: wpb.Extend) -> None:
        """Adds prompt tokens.

        Raises:
            ApiError: as `submit`.
        """
        serial = self._serials.get(frame.rid)
        draft = self._open[serial].drafts[frame.rid] if serial is not None else None
        if serial is None or draft is None or not draft.more:
            return
        token_ids = list(frame.token_ids)
        try:
            request_validation.check_token_ids("token_ids", token_ids, self._limits.vocab_size)
            check_length(len(draft.token_ids) + len(token_ids), self._limits)
        except ApiError as error:
            self._drop(frame.rid)
            self._refuse(frame.rid, len(draft.token_ids) + len(token_ids), str(error))
        else:
            draft.token_ids.extend(token_ids)
            draft.more = frame.more
            self._count(len(token_ids))
        self._complete(serial)

    def cancel(self, rid: int) -> bool:
        """Drops a sequence; False if it is not being assembled."""
        serial = self._serials.get(rid)
        if serial is None:
            return False
        draft = self._drop(rid)
        self._refuse(rid, len(draft.token_ids), "", EndReason.CANCELLED)
        self._complete(serial)
        return True

    def expire(self, now: float) -> None:
        """Drops the sequences whose deadline has passed."""
        if now < self._earliest:
            return
        self._earliest = math.inf
        for serial, group in list(self._open.items()):
            for rid, draft in list(group.drafts.items()):
                if draft.deadline is not None and draft.deadline <= now:
                    self._drop(rid)
                    self._refuse(rid, len(draft.token_ids), "", EndReason.DEADLINE)
                elif draft.deadline is not None:
                    self._earliest = min(self._earliest, draft.deadline)
            self._complete(serial)

    def take_groups(self) -> list[SequenceGroup]:
        """Groups completed since the last call."""
        groups, self._groups = self._groups, []
        return groups

    def take_refusals(self) -> list[Refusal]:
        """Sequences that were refused, cancelled or late since the last call."""
        refusals, self._refusals = self._refusals, {}
        return list(refusals.values())

    def give_up(self) -> list[int]:
        """Drops everything that is being assembled. Returns the rids, in order of service."""
        rids = list(self._serials)
        self._open.clear()
        self._serials.clear()
        self._num_tokens = self._num_bytes = 0
        return rids

    def _open_group(self, serial: int) -> _OpenGroup:
        group = self._open.get(serial)
        if group is None:
            if len(self._open) >= MAX_OPEN_GROUPS:
                raise _too_much(f"more than {MAX_OPEN_GROUPS} unfinished groups")
            group = self._open[serial] = _OpenGroup()
        return group

    def _is_known(self, rid: int) -> bool:
        return rid in self._serials or rid in self._refusals or self._is_live(rid)

    def _draft(self, record: wpb.SubmitSequence, now: float) -> _Draft:
        refuse_unlisted(record, request_validation.SEQUENCE)
        request_validation.check_adoption_key("adoption_key", record.adoption_key)
        token_ids, params = check_sequence(record, self._limits)
        deadline = now + record.deadline_left_ms / 1000 if record.deadline_left_ms else None
        num_bytes = _DRAFT_BYTES + record.ByteSize()
        return _Draft(record, params, token_ids, record.more, now, deadline, num_bytes)

    def _count(self, num_tokens: int, num_bytes: int = 0) -> None:
        self._num_tokens += num_tokens
        self._num_bytes += num_bytes
        if self._num_tokens > MAX_ASSEMBLING_TOKENS:
            raise _too_much(f"more than {MAX_ASSEMBLING_TOKENS} tokens of unfinished prompts")
        if self._num_bytes > MAX_ASSEMBLING_BYTES:
            raise _too_much(f"more than {MAX_ASSEMBLING_BYTES} bytes of unfinished groups")

    def _drop(self, rid: int) -> _Draft:
        draft = self._open[self._serials.pop(rid)].drafts.pop(rid)
        self._num_tokens -= len(draft.token_ids)
        self._num_bytes -= draft.num_bytes
        return draft

    def _refuse(
        self,
        rid: int,
        end_pos: int,
        message: str,
        reason: EndReason = EndReason.INVALID,
    ) -> None:
        self._refusals[rid] = Refusal(rid, end_pos, reason, message)

    def _complete(self, serial: int) -> None:
        """Moves the group on if this was its last frame."""
        group = self._open.get(serial)
        if group is None or not group.is_complete:
            return
        arrivals: list[Arrival] = []
        for rid in list(group.drafts):
            draft = self._drop(rid)
            try:
                seq = self._sequence(draft)
            except ApiError as error:
                self._refuse(rid, len(draft.token_ids), str(error))
            else:
                record = draft.record
                arrivals.append(Arrival(rid, seq, record.traceparent, record.tracestate, record.adoption_key))
        del self._open[serial]
        self._groups.append(SequenceGroup(serial, arrivals))

    def _sequence(self, draft: _Draft) -> Sequence:
        record = draft.record
        seq = build_sequence(
            record,
            draft.token_ids,
            draft.params,
            self._limits,
            prompt_len=record.prompt_len,
            seed=record.seed,
            arrived=draft.arrived,
            deadline=draft.deadline,
            choice=record.choice,
            chain_hash=record.chain_hash,
            may_return=not record.keep,
            logits_every=record.logits_every,
            shares_prompt=record.shares_prompt,
            pooling=told_pooling(record.pooling),
        )
        seq.expects_kv = record.expects_kv
        seq.ledger.request_id = record.request_id[:MAX_REQUEST_ID_BYTES]
        seq.ledger.tenant = record.tenant[:MAX_TENANT_BYTES]
        return seq


def _too_much(message: str) -> ApiError:
    return ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="SESSION_BOUNDS")
