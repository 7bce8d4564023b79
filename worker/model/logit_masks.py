"""Finds the biases and masks of a sequence's row of logits, from its parameters.

The kernels define the order of the changes (docs/explanation/determinism.md). The ids concerned:
- `logit_bias`: its ids.
- `allowed_token_ids`: all ids except those and the model's end-of-sequence ids are masked.
- `bad_words_token_ids`: ids that would complete one of the sequences within the output are masked.
- Before `min_tokens` output tokens, ids that would end the sequence are masked: the request's `stop_token_ids`, and the
  model's end-of-sequence ids unless `ignore_eos`. Stop token sequences and stop strings are not masked, because they
  are not single ids; worker/engine/stop_rules.py ignores them until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from common.params.sampling_params import SamplingParams
from kernels.interface import AllowedIds, BiasedIds, MaskedIds
from kernels.no_token import NO_TOKEN
from worker.engine.batch import TokenHistory
from worker.model.logit_adjustments import MOST_IDLE

Ids = tuple[int, ...]


class BadWords:
    """Forbidden sequences, indexed by the token before their last one.

    Args:
        sequences: of one id or more each.

    Attributes:
        reach: number of newest output tokens that matter.
    """

    def __init__(self, sequences: Iterable[Ids]) -> None:
        self._alone = list[int]()
        self._behind = dict[int, list[tuple[Ids, int]]]()
        self.reach = 0
        for *before, last in sequences:
            if before:
                self._behind.setdefault(before[-1], []).append((tuple(before), last))
                self.reach = max(self.reach, len(before))
            else:
                self._alone.append(last)

    def next_ids(self, output: list[int]) -> list[int]:
        """Ids that would complete a forbidden sequence after `output`; its last `reach` tokens are enough."""
        found = self._behind.get(output[-1], ()) if output else ()
        return [*self._alone, *(last for before, last in found if _ends_with(output, before))]

    def next_pairs(self, output: list[int]) -> list[tuple[int, int]]:
        """Ids that would complete a forbidden sequence after `output` and one more token: (that token, id), NO_TOKEN
        for any."""
        pairs = [(NO_TOKEN, last) for last in self._alone]
        for newest, found in self._behind.items():
            pairs += ((newest, last) for before, last in found if _ends_with(output, before[:-1]))
        return pairs


def _ends_with(output: list[int], end: Ids) -> bool:
    return not end or tuple(output[-len(end) :]) == end


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Rules:
    """Parameters of a sequence as steps need them, limited to ids that the model has."""

    params: SamplingParams
    bias_ids: Ints
    biases: npt.NDArray[np.float32]
    allowed: Ints
    ending: list[int]
    bad_words: BadWords

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: frozenset[int], size: int) -> _Rules:
        """The rules of a model with `size` ids."""
        bias = [(token, value) for token, value in params.biases if token < size]
        allowed = set(params.allowed_token_ids) | eos_token_ids if params.allowed_token_ids else set[int]()
        ending = set(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        return cls(
            params,
            np.array([token for token, _ in bias], np.int64),
            np.array([value for _, value in bias], np.float32),
            np.array(_within(allowed, size), np.int64),
            _within(ending, size) if params.min_tokens else [],
            BadWords(ids for ids in params.bad_words_token_ids if max(ids) < size),
        )


class LogitMasks:
    """Biases and masks of steered sequences. Keeps what it derives from their parameters from step to step.

    Args:
        eos_token_ids: the model's.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._rules: dict[int, _Rules] = {}

    def biased(self, histories: Mapping[int, TokenHistory], size: int) -> BiasedIds | None:
        """Biases of these rows; None if there are none.

        Args:
            histories: by row of logits.
            size: logits of a row.
        """
        given = {row: self._of(h, size) for row, h in histories.items() if h.params.logit_bias}
        if not given:
            return None
        ids = [rules.bias_ids for rules in given.values()]
        biases = np.concatenate([rules.biases for rules in given.values()])
        return BiasedIds(_rows(given, ids), np.concatenate(ids), biases)

    def allowed(self, histories: Mapping[int, TokenHistory], size: int) -> AllowedIds | None:
        """The only ids that some rows may sample; arguments as for `biased`."""
        given = {row: h for row, h in histories.items() if h.params.allowed_token_ids and not h.params.grammar}
        ids = {row: self._of(h, size).allowed for row, h in given.items()}
        if not ids:
            return None
        return AllowedIds(_rows(ids, ids.values()), np.concatenate(list(ids.values())))

    def masked(
        self,
        histories: Mapping[int, TokenHistory],
        late: Mapping[int, int],
        newest: Callable[[list[int]], torch.Tensor],
        size: int,
    ) -> MaskedIds | None:
        """Ids that rows must not sample now: they would end the sequence too early, or complete a bad word.

        Args:
            histories: by row of logits.
            late: places of the newest tokens of rows that have one more token than their histories.
            newest: the tokens at such places, on the device.
            size: logits of a row.
        """
        found = [
            (row, *pair)
            for row, history in histories.items()
            if not history.params.grammar and (history.params.min_tokens or history.params.bad_words_token_ids)
            for pair in self._masked(history, is_late=row in late, size=size)
        ]
        if not found:
            return None
        rows, after, ids = np.array(found, np.int64).T
        if (after == NO_TOKEN).all():
            return MaskedIds(rows, ids)
        return MaskedIds(rows, ids, after, newest([late.get(row, -1) for row in rows.tolist()]))

    def narrow(self, history: TokenHistory, bits: npt.NDArray[np.uint32], size: int) -> bool:
        """Clears bits of ids that a row must not sample now; False, with `bits` unchanged, if none is left.

        Args:
            history: of a sequence whose grammar allows some token.
            bits: a mask as in AllowedBits; changed.
            size: logits of a row.
        """
        params = history.params
        if not (params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens):
            return True
        rules, count = self._of(history, size), history.num_output
        kept = np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)
        if params.allowed_token_ids:
            others = np.ones(len(kept), np.bool_)
            others[rules.allowed] = False
            kept[others] = False
        kept[rules.bad_words.next_ids(history.output_from(max(0, count - rules.bad_words.reach)))] = False
        if not kept.any():
            return False
        if count < params.min_tokens:
            longer = kept.copy()
            longer[rules.ending] = False
            kept = longer if longer.any() else kept
        bits[:] = np.packbits(kept, bitorder="little").view(np.uint32)
        return True

    def _masked(self, history: TokenHistory, *, is_late: bool, size: int) -> list[tuple[int, int]]:
        """Pairs of a token and an id that is masked directly after it."""
        rules, count = self._of(history, size), history.num_output
        ending = rules.ending if count + is_late < rules.params.min_tokens else []
        output = history.output_from(max(0, count - rules.bad_words.reach))
        pairs = [(NO_TOKEN, token) for token in ending]
        if is_late:
            return pairs + rules.bad_words.next_pairs(output)
        return pairs + [(NO_TOKEN, token) for token in rules.bad_words.next_ids(output)]

    def _of(self, history: TokenHistory, size: int) -> _Rules:
        rules = self._rules.get(history.seq_id)
        if rules is None or rules.params is not history.params:
            rules = self._rules[history.seq_id] = _Rules.of(history.params, self._eos_token_ids, size)
        return rules

    def forget(self, histories: Mapping[int, TokenHistory]) -> None:
        """Bounds the rules kept of sequences that have ended or wait: as many as run now, and some."""
        if len(self._rules) > 2 * len(histories) + MOST_IDLE:
            now = {history.seq_id for history in histories.values()}
            self._rules = {seq_id: rules for seq_id, rules in self._rules.items() if seq_id in now}


def _rows(by_row: Iterable[int], ids: Iterable[Ints]) -> Ints:
    return np.repeat(np.array(list(by_row), np.int64), [len(one) for one in ids])


def _within(ids: Iterable[int], size: int) -> list[int]:
    return [token for token in sorted(ids) if 0 <= token < size]
