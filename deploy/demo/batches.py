"""Turns the document stream into batches: documents packed into rows, and which positions count as loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from deploy.demo.corpus import END_OF_TEXT, TURN_END, TURN_START, Learned, Mixture, documents
from deploy.demo.tokenizer import CONTEXT_LENGTH, token_id

TOKENS_PER_BATCH = 2048
ROW_LENGTHS = (*(256,) * 13, *(512,) * 2, CONTEXT_LENGTH)
"""Row lengths of consecutive batches: mostly short for speed, sometimes as long as the model's context."""

LONGER_ROWS = (*(512,) * 7, CONTEXT_LENGTH)
"""Those of documents with tools, of which four in ten have more than 256 tokens."""

_POOL = 128
_ENCODE_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """An encoded document: its token ids, and for each of them whether predicting it is trained."""

    ids: list[int]
    learned: list[bool]


def _inside(ids: list[int], opening: list[int], closing: int) -> list[bool]:
    """True for every token after the sequence `opening`, up to and with the next `closing` token."""
    learned, inside = [False] * len(ids), False
    for position, token in enumerate(ids):
        learned[position] = inside
        if token == closing:
            inside = False
        elif token == opening[-1] and ids[max(0, position + 1 - len(opening)) : position + 1] == opening:
            inside = True
    return learned


def samples(tokenizer: Tokenizer, mixture: Mixture) -> Iterator[Sample]:
    """The training stream, encoded; every document is closed by the end-of-text token."""
    end_of_text, turn_end = token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, TURN_END)
    answer = tokenizer.encode(f"{TURN_START}assistant\n").ids
    equals, newline = tokenizer.encode("1 =").ids[-1:], token_id(tokenizer, "\n")
    stream = documents(mixture)
    while True:
        chunk = list(itertools.islice(stream, _ENCODE_AT_ONCE))
        for document, encoding in zip(chunk, tokenizer.encode_batch([d.text for d in chunk]), strict=True):
            ids = [*encoding.ids, end_of_text]
            if document.learned is Learned.ANSWERS:
                yield Sample(ids, _inside(ids, answer, turn_end))
            elif document.learned is Learned.RESULTS:
                yield Sample(ids, _inside(ids, equals, newline))
            else:
                yield Sample(ids, [True] * len(ids))


class Packer:
    """Packs whole documents into rows of a wanted length, out of a small pool, so that little is padding.

    Args:
        tokenizer: that encodes the documents.
        mixture: of which they are.
        lengths: row lengths of consecutive batches. Most documents should fit into the shortest.
    """

    def __init__(self, tokenizer: Tokenizer, mixture: Mixture, lengths: Sequence[int] = ROW_LENGTHS) -> None:
        self._lengths = lengths
        self._stream = samples(tokenizer, mixture)
        self._pool: list[Sample] = []
        self._padding = token_id(tokenizer, END_OF_TEXT)
        self.taken = 0
        """Number of documents of the stream that have been read so far."""

    def _refill(self) -> None:
        while len(self._pool) < _POOL:
            sample = next(self._stream)
            self.taken += 1
            if len(sample.ids) <= CONTEXT_LENGTH:
                self._pool.append(sample)

    def row(self, length: int) -> tuple[list[int], list[bool]]:
        """One row of `length` ids and loss flags; the oldest documents that fit go first."""
        self._refill()
        ids: list[int] = []
        learned: list[bool] = []
        kept: list[Sample] = []
        for sample in self._pool:
            if len(ids) + len(sample.ids) <= length:
                ids += sample.ids
                learned += sample.learned
            else:
                kept.append(sample)
        self._pool = kept
        missing = length - len(ids)
        return ids + [self._padding] * missing, learned + [False] * missing

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids `[rows, length]` and labels of the same shape, where -100 marks what is not learned."""
        length = self._lengths[step % len(self._lengths)]
        rows = [self.row(length) for _ in range(TOKENS_PER_BATCH // length)]
        ids = torch.tensor([row_ids for row_ids, _ in rows])
        flags = torch.tensor([learned for _, learned in rows])
        return ids, ids.masked_fill(~flags, -100)
