"""Digests of logits for receipts, and the comparison of a replay with a receipt (docs/reference/contract.md). Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash
from fissile.receipts import RequestDigest
from fissile.v1 import inference_pb2 as pb


class LogitChain:
    """Running digests of logits, made as the tokens come: of each row's own digest, with the one before as the seed.

    Args:
        first_pos: absolute position of the first token.
        every: the logits of every n-th token count.
    """

    def __init__(self, first_pos: int, every: int) -> None:
        self._every = every
        self._next = first_pos
        self._running = 0
        # Lists of protos take eight bytes for each, and are copied at once.
        self._made = pb.Receipt(logits_every=every)

    def add(self, positions: Iterable[int], row_digests: Iterable[int]) -> None:
        """Takes the digests of rows, by the positions of their tokens; those that have come before count no more."""
        for position, digest in zip(positions, row_digests, strict=True):
            if position == self._next:
                self._running = xxhash.xxh3_64_intdigest(struct.pack("<Q", digest), self._running)
                self._made.logit_digests.append(self._running)
                self._next += self._every

    def of_answer(self, num_tokens: int) -> pb.Receipt | None:
        """The part of a receipt that says how the logits of so many tokens were; None where one has not come."""
        wanted = -(-num_tokens // self._every)
        # A worker may have computed tokens behind those of the answer.
        del self._made.logit_digests[wanted:]
        return self._made if len(self._made.logit_digests) == wanted else None


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a comparison: the verdict, the first generated token that differs if it is known, and a sentence."""

    verdict: pb.ReplayVerdict.ValueType
    detail: str
    position: int | None = None


def compare_request(receipt: pb.Receipt, request: RequestDigest, num_answers: int) -> Finding | None:
    """Difference between a request and the one that a receipt is of; None when they are the same.

    Args:
        receipt: the receipt.
        request: the request with which it is to be replayed.
        num_answers: its `n`.
    """
    problem = ""
    if receipt.index >= num_answers:
        problem = f"the receipt is of answer {receipt.index}, and the request asks for {num_answers}"
    elif receipt.seed != str(request.seed):
        problem = f"the seed is {request.seed}, and that of the receipt {receipt.seed}"
    elif receipt.prompt_tokens != request.prompt_tokens:
        problem = f"the prompt has {request.prompt_tokens} tokens, and that of the receipt {receipt.prompt_tokens}"
    elif receipt.request_sha256 != request.of_answer(receipt.index):
        problem = "the prompt's tokens or the sampling parameters are not those of the receipt"
    return Finding(pb.REPLAY_VERDICT_OTHER_REQUEST, problem) if problem else None


def compare_answer(
    receipt: pb.Receipt, token_ids: Sequence[int], replay: pb.Receipt, replayed_ids: Sequence[int]
) -> Finding:
    """Comparison of a replay of the same request with a receipt.

    Args:
        receipt: the receipt.
        token_ids: the answer that it is of; empty where that is not known.
        replay: the receipt of the replay.
        replayed_ids: what the replay has generated.
    """
    logits = _first_difference(receipt.logit_digests, replay.logit_digests)
    logits = None if logits is None else logits * receipt.logits_every
    is_same = receipt.output_sha256 == replay.output_sha256 and receipt.output_tokens == replay.output_tokens
    choice = None if is_same or not token_ids else _first_difference(token_ids, replayed_ids)
    if choice is None and not is_same and token_ids:
        # One is the beginning of the other.
        choice = min(len(token_ids), len(replayed_ids))
    if logits is not None and (choice is None or logits <= choice):
        return Finding(pb.REPLAY_VERDICT_LOGITS_DIFFER, f"the logits of generated token {logits} differ", logits)
    if is_same:
        return Finding(pb.REPLAY_VERDICT_EQUAL, f"all {receipt.output_tokens} tokens are the same")
    return Finding(pb.REPLAY_VERDICT_CHOICE_DIFFERS, _choice_detail(receipt, token_ids, replayed_ids, choice), choice)


def _choice_detail(
    receipt: pb.Receipt, token_ids: Sequence[int], replayed_ids: Sequence[int], position: int | None
) -> str:
    if position is None:
        return f"the replay's {len(replayed_ids)} tokens are not the {receipt.output_tokens} of the receipt"
    was, now = (
        str(ids[position]) if position < len(ids) else "the end of the answer" for ids in (token_ids, replayed_ids)
    )
    return f"generated token {position} was {was}, and is {now} in the replay"


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where both have an entry and these differ."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
