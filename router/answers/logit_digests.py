"""Digests of logits for receipts, and the comparison of a replay with a receipt (docs/reference/contract.md). Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash
from fissile.receipts import RequestDigest
from fissile.v1 import inference_pb2 as pb


class LogitChain:
    """Computes running digests of logits: each digest hashes a row's digest with the previous one as the seed.

    Args:
        first_pos: absolute position of the first token.
        every: distance in tokens between digested rows of logits.
    """

    def __init__(self, first_pos: int, every: int) -> None:
        self._every = every
        self._next = first_pos
        self._running = 0
        # Lists of protos take eight bytes per digest and are copied in one call.
        self._made = pb.Receipt(logits_every=every)

    def add(self, positions: Iterable[int], row_digests: Iterable[int]) -> None:
        """Adds the digests of rows, by the positions of their tokens; ignores repeated ones."""
        for position, digest in zip(positions, row_digests, strict=True):
            if position == self._next:
                self._running = xxhash.xxh3_64_intdigest(struct.pack("<Q", digest), self._running)
                self._made.logit_digests.append(self._running)
                self._next += self._every

    def of_answer(self, num_tokens: int) -> pb.Receipt | None:
        """Returns the digests of the first `num_tokens` tokens as a part of a receipt; None if one is missing."""
        wanted = -(-num_tokens // self._every)
        # A worker may have computed tokens behind the end of the answer.
        del self._made.logit_digests[wanted:]
        return self._made if len(self._made.logit_digests) == wanted else None


@dataclass(frozen=True, slots=True)
class ReplayComparison:
    """Result of a comparison: the verdict, a sentence, and the first generated token that differs, if known."""

    verdict: pb.ReplayVerdict.ValueType
    detail: str
    position: int | None = None


def compare_request(receipt: pb.Receipt, request: RequestDigest, num_answers: int) -> ReplayComparison | None:
    """Compares a request with that of a receipt; returns None if they are the same.

    Args:
        receipt: the receipt.
        request: the request to replay.
        num_answers: `n` of the request.
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
    return ReplayComparison(pb.REPLAY_VERDICT_OTHER_REQUEST, problem) if problem else None


def compare_answer(
    receipt: pb.Receipt, token_ids: Sequence[int], replay: pb.Receipt, replayed_ids: Sequence[int]
) -> ReplayComparison:
    """Compares the answer of a replay with a receipt of the same request.

    Args:
        receipt: the receipt.
        token_ids: the original answer; empty if unknown.
        replay: the receipt of the replay.
        replayed_ids: tokens that the replay generated.
    """
    logits = _first_difference(receipt.logit_digests, replay.logit_digests)
    logits = None if logits is None else logits * receipt.logits_every
    is_same = receipt.output_sha256 == replay.output_sha256 and receipt.output_tokens == replay.output_tokens
    choice = None if is_same or not token_ids else _first_difference(token_ids, replayed_ids)
    if choice is None and not is_same and token_ids:
        # One answer is the beginning of the other.
        choice = min(len(token_ids), len(replayed_ids))
    if logits is not None and (choice is None or logits <= choice):
        return ReplayComparison(
            pb.REPLAY_VERDICT_LOGITS_DIFFER, f"the logits of generated token {logits} differ", logits
        )
    if is_same:
        return ReplayComparison(pb.REPLAY_VERDICT_EQUAL, f"all {receipt.output_tokens} tokens are the same")
    return ReplayComparison(
        pb.REPLAY_VERDICT_CHOICE_DIFFERS, _choice_detail(receipt, token_ids, replayed_ids, choice), choice
    )


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
    """Index of the first entries that differ, among those that both have."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
