"""From a Session's frames to groups of sequences: the deciding half of its reading direction.

Invariants:
  * A group leaves whole, once, in the order in which groups were completed: with its last Submit and the last Extend of
    every sequence in it (docs/architecture.md). A sequence that is refused, cancelled or late leaves its group and
    costs the others nothing.
  * A rid that is known here or runs already is a no-op (S5); an Extend or Cancel of an unknown one is ignored.
  * What is held is bounded: a prompt by the model's length, all of them by MAX_ASSEMBLING_TOKENS and their records by
    MAX_ASSEMBLING_BYTES, groups by MAX_OPEN_GROUPS. A router that keeps to the protocol has one open group.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import grpc
from fissile.worker.v1 import worker_pb2 as wpb

from common.block_hash import hash_chain, salt_root
from common.errors import ApiError, InvalidFieldError, PromptTooLongError
from common.limits import MAX_ASSEMBLING_BYTES, MAX_ASSEMBLING_TOKENS, MAX_OPEN_GROUPS
from common.rpc.unsupported_fields import refuse_unlisted
from common.sampling_params import SamplingParams
from worker.engine.sequence import Sequence
from worker.session import request_validation

# What a sequence costs besides the bytes of its record: its objects here.
_DRAFT_BYTES = 512


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that a sequence is checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: longest prompt plus answer, in tokens.
        block_size: tokens per KV block.
        hash_seed: seed of the block hashes.
        weights_digest: of the model, part of the hashes of salted prompts.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    hash_seed: int
    weights_digest: str = ""

    def hash_root(self, cache_salt: bytes) -> int | None:
        """Parent hash of the first block of a prompt with this salt, as the router computes it; None without one."""
        return salt_root(self.weights_digest.encode(), cache_salt=cache_salt, seed=self.hash_seed)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that is complete, with the trace context of its router's span."""

    rid: int
    seq: Sequence
    traceparent: str
    tracestate: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sequence that does not get to the engine: its rid, its tokens so far, and why."""

    rid: int
    end_pos: int
    reason: wpb.EndReason.ValueType
    message: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that enter the waiting queue together."""

    serial: int
    arrivals: list[Arrival]


@dataclass(slots=True)
class _Draft:
    """A sequence on its way in."""

    record: wpb.SubmitSequence
    params: SamplingParams
    token_ids: array[int]
    more: bool
    arrived: float
    deadline: float | None
    num_bytes: int


@dataclass(slots=True)
class _OpenGroup:
    """A group on its way in; `drafts` in order of service."""

    drafts: dict[int, _Draft] = field(default_factory=dict)
    more: bool = True

    @property
    def is_complete(self) -> bool:
        return not self.more and not any(draft.more for draft in self.drafts.values())


class Inbox:
    """Assembles the groups of one Session.

    Args:
        limits: of the engine.
        is_live: whether a rid of this Session runs already, or its end has not been written.
    """

    def __init__(self, limits: EngineLimits, is_live: Callable[[int], bool]) -> None:
        self._limits = limits
        self._is_live = is_live
        self._open: dict[int, _OpenGroup] = {}
        self._serials: dict[int, int] = {}
        self._num_tokens = self._num_bytes = 0
        # No deadline of what is on its way in is before this.
        self._earliest = math.inf
        self._groups: list[Group] = []
        self._refusals: dict[int, Refusal] = {}

    @property
    def is_empty(self) -> bool:
        """True if nothing is on its way in."""
        return not (self._open or self._groups or self._refusals)

    @property
    def num_seqs(self) -> int:
        """Sequences on their way in."""
        return len(self._serials)

    def submit(self, frame: wpb.Submit, now: float) -> None:
        """Takes the sequences of a Submit; `now` is when it was read, monotonic seconds.

        Raises:
            ApiError: the Session must be closed: it holds too much.
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
        """Takes further prompt tokens.

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
            self._check_length(len(draft.token_ids) + len(token_ids))
        except ApiError as error:
            self._drop(frame.rid)
            self._refuse(frame.rid, len(draft.token_ids) + len(token_ids), str(error))
        else:
            draft.token_ids.extend(token_ids)
            draft.more = frame.more
            self._count(len(token_ids))
        self._complete(serial)

    def cancel(self, rid: int) -> bool:
        """Drops a sequence; False when it is not on its way in."""
        serial = self._serials.get(rid)
        if serial is None:
            return False
        draft = self._drop(rid)
        self._refuse(rid, len(draft.token_ids), "", wpb.END_REASON_CANCELLED)
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
                    self._refuse(rid, len(draft.token_ids), "", wpb.END_REASON_DEADLINE)
                elif draft.deadline is not None:
                    self._earliest = min(self._earliest, draft.deadline)
            self._complete(serial)

    def take_groups(self) -> list[Group]:
        """Groups that have become complete since the last call."""
        groups, self._groups = self._groups, []
        return groups

    def take_refusals(self) -> list[Refusal]:
        """Sequences that have been refused, cancelled or were late since the last call."""
        refusals, self._refusals = self._refusals, {}
        return list(refusals.values())

    def give_up(self) -> list[int]:
        """Forgets everything that is on its way in; the rids, in order of service."""
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
        token_ids = list(record.token_ids)
        request_validation.check_token_ids("token_ids", token_ids, self._limits.vocab_size)
        self._check_length(len(token_ids))
        request_validation.check_cache_salt(record.cache_salt)
        params = request_validation.sampling_params(record.params, self._limits.vocab_size)
        deadline = now + record.deadline_left_ms / 1000 if record.deadline_left_ms else None
        num_bytes = _DRAFT_BYTES + record.ByteSize()
        return _Draft(record, params, array("I", token_ids), record.more, now, deadline, num_bytes)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._limits.max_model_len:
            raise PromptTooLongError("token_ids", num_tokens, self._limits.max_model_len)

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
        reason: wpb.EndReason.ValueType = wpb.END_REASON_INVALID,
    ) -> None:
        self._refusals[rid] = Refusal(rid, end_pos, reason, message)

    def _complete(self, serial: int) -> None:
        """Lets the group go when its last frame is in."""
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
                arrivals.append(Arrival(rid, seq, draft.record.traceparent, draft.record.tracestate))
        del self._open[serial]
        self._groups.append(Group(serial, arrivals))

    def _sequence(self, draft: _Draft) -> Sequence:
        record, limits = draft.record, self._limits
        if not 1 <= record.prompt_len <= len(draft.token_ids):
            raise InvalidFieldError("prompt_len", f"is {record.prompt_len}", f"1 to {len(draft.token_ids)}")
        if record.prompt_len >= limits.max_model_len:
            raise PromptTooLongError("token_ids", record.prompt_len, limits.max_model_len)
        root = limits.hash_root(record.cache_salt)
        chain = check_chain_hash(draft.token_ids[: record.prompt_len], record.chain_hash, limits, root)
        return Sequence(
            draft.token_ids.tolist(),
            limits.block_size,
            draft.params,
            num_prompt_tokens=record.prompt_len,
            seed=record.seed,
            choice=record.choice,
            arrive_time=draft.arrived,
            deadline=draft.deadline,
            hash_root=root,
            cache_salt=record.cache_salt,
            priority=request_validation.priority(record.priority),
            block_hashes=chain,
            packed_ids=draft.token_ids.tobytes(),
            may_return=not record.keep,
        )


def _too_much(message: str) -> ApiError:
    return ApiError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="SESSION_BOUNDS")


def check_chain_hash(prompt: Many[int], chain_hash: int, limits: EngineLimits, root: int | None) -> list[int]:
    """Checks that the router hashes blocks as this worker does (docs/determinism.md).

    Returns:
        The hashes of the prompt's full blocks.

    Raises:
        InvalidFieldError: hash seed, block size or tokens differ.
    """
    chain = hash_chain(prompt, limits.block_size, root=root, seed=limits.hash_seed)
    expected = chain[-1] if chain else 0
    if chain_hash != expected:
        raise InvalidFieldError(
            "chain_hash",
            f"is {chain_hash:#x}: hash seed, block size or tokens of router and worker differ",
            f"{expected:#x} for {len(prompt)} tokens in blocks of {limits.block_size}, seed {limits.hash_seed}",
        )
    return chain
