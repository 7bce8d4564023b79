"""Penalties of logits, and the ids that they concern, kept from step to step: a row sees one more token a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.no_token import NO_TOKEN

Floats = npt.NDArray[np.float32]
_LARGEST = np.finfo(np.float32).max


class SeenIds:
    """Ids that a row has seen, and how often each is in its output. Adding a token takes a microsecond, whatever the
    number of ids.

    Attributes:
        ids: int32, each once; later ones are at the end.
        output_counts: float32, of each; 0 for an id that is in the prompt only.
    """

    __slots__ = ("_places", "ids", "output_counts")

    def __init__(self, prompt_ids: npt.NDArray[np.int64], output_ids: Iterable[int]) -> None:
        found, counts = np.unique(np.array(list(output_ids), np.int64), return_counts=True)
        prompt_only = np.setdiff1d(prompt_ids, found)
        ids = np.concatenate((found, prompt_only))
        order = np.argsort(ids)
        self.ids = array("i", ids[order].astype(np.int32).tobytes())
        both = np.concatenate((counts, np.zeros(len(prompt_only))))
        self.output_counts = array("f", both[order].astype(np.float32).tobytes())
        self._places = {token_id: place for place, token_id in enumerate(self.ids)}

    def copy(self) -> SeenIds:
        """An independent copy."""
        other = object.__new__(SeenIds)
        other.ids, other.output_counts, other._places = self.ids[:], self.output_counts[:], dict(self._places)
        return other

    def add(self, token_id: int) -> None:
        """Adds one output token."""
        place = self._places.get(token_id)
        if place is None:
            self._places[token_id] = len(self.ids)
            self.ids.append(token_id)
            self.output_counts.append(1.0)
        else:
            self.output_counts[place] += 1.0


@dataclass(frozen=True)
class Penalties:
    """Penalties of R of the S rows: those that have any.

    Rows keep lists of their own, so that rows of different lengths need no padding: a padding id would be penalized
    like the others.

    Attributes:
        rows: int64 [R].
        seen: of each.
        repetition: float32 [R], above 0; 1 is off.
        presence: float32 [R]; 0 is off.
        frequency: float32 [R]; 0 is off.
        late: int64 [R] on the back end's device, one more output token of each row, which the host does not know yet;
            NO_TOKEN for none. None if no row has one.
    """

    rows: npt.NDArray[np.int64]
    seen: list[SeenIds]
    repetition: Floats
    presence: Floats
    frequency: Floats
    late: torch.Tensor | None = None

    def where(self, wanted: npt.NDArray[np.bool_]) -> Penalties:
        """Penalties of the rows selected by bool [R], without `late`."""
        seen = [one for one, is_wanted in zip(self.seen, wanted.tolist(), strict=True) if is_wanted]
        factors = self.repetition[wanted], self.presence[wanted], self.frequency[wanted]
        return Penalties(self.rows[wanted], seen, *factors)


def penalize(logits: Floats, penalties: Penalties) -> None:
    """Changes logits [S, V]: repetition, then presence, then frequency, each rounded to float32.

    Repetition divides a positive logit and multiplies another, so both become less likely (transformers'
    RepetitionPenaltyLogitsProcessor); the others subtract, once and per occurrence in the output.
    """
    late = [NO_TOKEN] * len(penalties.rows) if penalties.late is None else penalties.late.tolist()
    factors = zip(penalties.repetition, penalties.presence, penalties.frequency, strict=True)
    for row, seen, token, own in zip(penalties.rows.tolist(), penalties.seen, late, factors, strict=True):
        ids, counts = np.array(seen.ids, np.int64), np.array(seen.output_counts, np.float32)
        if token != NO_TOKEN:
            counts[ids == token] += 1
            if token not in seen.ids:
                ids, counts = np.append(ids, token), np.append(counts, np.float32(1))
        logits[row, ids] = _penalized(logits[row, ids], counts, *own)


def _penalized(values: Floats, counts: Floats, repetition: float, presence: float, frequency: float) -> Floats:
    # A value that a tiny penalty lets overflow stays finite: infinity means that the model's output is no number.
    limit = np.where(np.isfinite(values), _LARGEST, np.float32(np.inf))
    with np.errstate(over="ignore"):
        values = np.where(values > 0, values / repetition, values * repetition)
        values = np.clip(values, -limit, limit)
    values -= presence * (counts > 0)
    values -= frequency * counts
    return values
