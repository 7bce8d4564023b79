"""Computes token masks from a sequence's grammar and its output so far.

The state is a function of grammar and output. If this rank does not know a sequence, or knows it with other tokens, it
builds the state anew by giving a fresh matcher all tokens. All masks of a sequence with a grammar are combined into one
(docs/explanation/determinism.md): a token stays allowed if every mask allows it.

- An end-of-sequence token is allowed where the grammar may end, but not with `ignore_eos`.
- Before `min_tokens`, tokens that would end the sequence are masked, unless nothing else is left: the grammar wins.
- A grammar that allows nothing more ends its sequence, without a token.
- If `allowed_token_ids` and `bad_words` leave no token, the sequence fails.

If a grammar allows only one text, that text's usual tokens are proposed as drafts (forced_text.py in
worker/engine/speculation).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from common.constraints.library import Matcher
from kernels.interface import AllowedBits
from worker.engine.batch import TokenHistory
from worker.grammars import Compiled, GrammarError, Grammars
from worker.model.logit_masks import LogitMasks
from worker.model.text_ahead import TextAhead

Bits = npt.NDArray[np.uint32]
# Masks of rows; and rows that have ended, with the reason.
Confined: TypeAlias = tuple[AllowedBits | None, dict[int, str]]
NOT_CONFINED: Final[Confined] = (None, {})
# Tokens given to a matcher at once; meanwhile it holds the interpreter's lock.
_MOST_AT_ONCE: Final = 1024
_WORD_BITS: Final = 32
# Most states kept of sequences that do not run now: some take a hundred kilobytes.
_MOST_IDLE: Final = 64
COMPLETE: Final = ""
# Failed searches for forced text in a row after which a sequence counts as inside a free text, where no search
# follows a word.
_FREE_TEXT: Final = 4
# Steps in a row that verified no forced text, after which searches become rarer: at powers of two of these steps, and
# at multiples of `_MOST_REST`.
_UNUSED: Final = 4
_MOST_REST: Final = 64
# CPU time of a mask that adds nothing to the library's data, in any vocabulary. Time beyond `_WARM_S` may have made the
# grammar larger; it is charged to the grammar as soon as `_CHARGED_S` of it are owed.
_WARM_S: Final = 3e-5
_CHARGED_S: Final = 1e-3
# Least CPU time of a sequence's slow masks in one step (worker/engine/constraint_pace.py). Most masks take some ten
# microseconds.
_SLOW_S: Final = 1e-4
# Most CPU time of a step's masks made without another thread, which costs 60 us with one answer at a time.
_QUICK_S: Final = 6e-5


class _Ended(Exception):
    """A row can get no token; the message is the reason, `COMPLETE` if the grammar allows nothing more."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Failed(Exception):
    """A matcher is in its error state; says why."""


@dataclass(slots=True)
class _State:
    """The matcher of one sequence, and its searches for forced text.

    Attributes:
        tokens: the sequence's own list.
        count: output tokens that the matcher has been given.
        matcher: a copy of that of `compiled`.
        compiled: the grammar.
        ahead: text that is known to be forced behind the tokens; None before the first search.
        misses: searches without a result since the last one that found text.
        choice: tokens between which the last search found a choice instead of text.
        unused: steps in a row that verified no forced text.
        seen: `count` when `unused` was last set.
        mask_s: CPU seconds of the last mask.
        owed_s: CPU seconds that the grammar is not charged for yet.
    """

    tokens: list[int]
    count: int
    matcher: Matcher
    compiled: Compiled
    ahead: TextAhead | None = None
    misses: int = 0
    choice: tuple[int, ...] = ()
    unused: int = 0
    seen: int = 0
    mask_s: float = 0.0
    owed_s: float = 0.0


class GrammarMasks:
    """Masks of the sequences that have a grammar; keeps their matchers from step to step.

    Args:
        grammars: compiled grammars.
        others: the other masks of the same sequences.
        eos_token_ids: the model's.
    """

    def __init__(self, grammars: Grammars, others: LogitMasks, eos_token_ids: frozenset[int]) -> None:
        self._grammars = grammars
        self._others = others
        self._eos = sorted(token for token in eos_token_ids if token < grammars.num_ids)
        self._states: dict[int, _State] = {}
        self._ahead_bits = np.empty(-(-grammars.num_ids // _WORD_BITS), np.uint32)
        # CPU seconds of slow masks, by sequence.
        self._slow: dict[int, float] = {}

    def take_slow(self) -> dict[int, float]:
        """CPU seconds of slow masks since the last call, by sequence."""
        slow, self._slow = self._slow, {}
        return slow

    def begin(self, histories: Mapping[int, TokenHistory]) -> None:
        """Starts to compile the grammars of a coming step."""
        for history in histories.values():
            if history.params.grammar and history.seq_id not in self._states:
                self._grammars.begin(history.params.grammar, history.cache_salt)

    def are_quick(self, histories: Mapping[int, TokenHistory]) -> bool:
        """True if making these rows' masks is probably quicker than handing them to another thread, which must wake up
        and take the interpreter's lock."""
        own = [self._states.get(history.seq_id) for history in histories.values() if history.params.grammar]
        return sum(_SLOW_S if state is None else state.mask_s for state in own) <= _QUICK_S

    def confined(self, histories: Mapping[int, TokenHistory]) -> Confined:
        """Masks of the rows that have a grammar; and rows that have ended, with the reason.

        Args:
            histories: by row of logits. A sequence with drafts has its rows in order, each with one more draft.
        """
        given = {row: history for row, history in histories.items() if history.params.grammar}
        if not given:
            return NOT_CONFINED
        self._forget(given)
        # In one piece, which the sampler reads without a copy.
        bits = np.empty((len(given), -(-self._grammars.num_ids // _WORD_BITS)), np.uint32)
        rows, ended, address = list[int](), dict[int, str](), bits.ctypes.data
        # By sequence, the index of its newest row's mask.
        newest: dict[int, int] = {}
        spent: dict[int, float] = {}
        began = time.thread_time()
        for row, history in given.items():
            before, place = newest.pop(history.seq_id, None), len(rows)
            if history.drafts and (before is None or not _has(bits[before], history.drafts[-1])):
                # The row before cannot draw this draft, so this row's result is not used.
                continue
            try:
                self._fill(history, bits[place], address + place * bits.strides[0])
            except _Ended as end:
                ended[row] = end.why
            else:
                newest[history.seq_id] = place
                rows.append(row)
            began, before_it = time.thread_time(), began
            if (state := self._states.get(history.seq_id)) is not None:
                state.mask_s = began - before_it
            self._charge(history, began - before_it)
            spent[history.seq_id] = spent.get(history.seq_id, 0.0) + began - before_it
        self._slow |= {seq_id: cpu_s for seq_id, cpu_s in spent.items() if cpu_s >= _SLOW_S}
        if not rows:
            return None, ended
        return AllowedBits(np.array(rows, np.int64), bits[: len(rows)]), ended

    def ahead(self, histories: Mapping[int, TokenHistory]) -> Confined:
        """Masks like `confined`, for rows that a draft model draws; does not change the sequences' grammar states.

        A sequence with slow masks or without a state gets no grammar mask: a draft is only a guess, and its step has
        time for only one slow mask per sequence. Other masks of these rows (allowed ids, bad words) always apply.

        Args:
            histories: token histories by row of logits, whose drafts are the step's tokens and the drafts so far.
        """
        given = {row: history for row, history in histories.items() if history.params.grammar}
        if not given:
            return NOT_CONFINED
        bits = np.empty((len(given), -(-self._grammars.num_ids // _WORD_BITS)), np.uint32)
        ended, began = dict[int, str](), time.thread_time()
        for own, (row, history) in zip(bits, given.items(), strict=True):
            try:
                self._write_ahead(history, own)
            except (_Ended, _Failed):
                ended[row] = COMPLETE
            began, before_it = time.thread_time(), began
            self._charge(history, began - before_it)
        return AllowedBits(np.array(list(given), np.int64), bits), ended

    def _write_ahead(self, history: TokenHistory, bits: Bits) -> None:
        """Writes the mask of one row that a draft model draws into `bits`; raises _Ended if it allows no token."""
        bits[:] = np.iinfo(np.uint32).max
        state = self._states.get(history.seq_id)
        known = state is not None and state.tokens is history.tokens and state.count <= history.num_output
        if state is not None and known and state.mask_s < _SLOW_S:
            matcher = state.matcher.deep_copy()
            matcher.consume_tokens(history.output_from(state.count))
            _check(matcher)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            _check(matcher)
            if history.params.ignore_eos:
                _clear(bits, self._eos)
        if not bits.any() or not self._others.narrow(history, bits, self._grammars.num_ids):
            raise _Ended(COMPLETE)

    def completes(self, history: TokenHistory, tokens: Sequence[int]) -> bool:
        """True if the grammar allows nothing after `tokens`, which were drawn under the masks of `history`.

        A state that has taken these tokens is already the next step's state.
        """
        state, new = self._states.get(history.seq_id), list(tokens)
        if state is None or state.tokens is not history.tokens or state.count != history.num_output:
            # A separate matcher, because a running step may use the states.
            compiled = self._grammars.begin(history.params.grammar, history.cache_salt)
            matcher = compiled.result().deep_copy()
            return matcher.consume_tokens(history.output_ids + new) and matcher.is_stopped()
        # If the matcher fails, the next step reports it.
        return self._consume(state, new) and state.matcher.is_stopped()

    def forced(self, history: TokenHistory, tokens: Sequence[int]) -> list[int]:
        """The usual tokens of the text that a grammar forces after a history and drawn tokens; [] if there is a choice,
        or no search is made.

        A token that would end the sequence is left out.
        """
        state = self._states.get(history.seq_id)
        if state is None or state.tokens is not history.tokens or state.count != history.num_output + len(tokens):
            return []
        # Slow masks are better made while the next step computes.
        if state.mask_s >= _SLOW_S or state.matcher.is_error() or state.matcher.is_stopped():
            return []
        if state.misses >= _FREE_TEXT and tokens and self._grammars.is_word(tokens[-1]):
            return []
        # In a free text the last choice is usually still allowed; checking that is quicker than a mask.
        if state.misses and state.choice and all(state.matcher.validate_tokens([token]) for token in state.choice):
            state.misses += 1
            return []
        if self._rests(state):
            return []
        began = time.thread_time()
        state.ahead = state.ahead or TextAhead(state.matcher)
        state.ahead.look(self._grammars, self._ahead_bits)
        self._charge(history, time.thread_time() - began)
        run = self._grammars.usual_tokens(state.ahead.text)
        run = run[:-1] if state.ahead.is_complete else run
        state.misses, state.choice = (0, ()) if run else (state.misses + 1, state.ahead.choice)
        return run

    @staticmethod
    def _rests(state: _State) -> bool:
        """True if this step makes no search, since recent steps did not verify the forced text."""
        moved, state.seen = state.count - state.seen, state.count
        is_unused = moved == 1 and state.ahead is not None and bool(state.ahead.text)
        state.unused = state.unused + 1 if is_unused else 0
        return state.unused > _UNUSED and state.unused % _MOST_REST != 0 and state.unused.bit_count() > 1

    def _consume(self, state: _State, tokens: list[int]) -> bool:
        """Gives a state's matcher further tokens; False if it has failed at them."""
        if not state.matcher.consume_tokens(tokens):
            return False
        state.count += len(tokens)
        if state.ahead is not None:
            state.ahead = state.ahead.moved([self._grammars.text_of(token) for token in tokens], state.matcher)
        return True

    def _charge(self, history: TokenHistory, cpu_s: float) -> None:
        """Charges a sequence's grammar for CPU time; if the grammar has become too large, the sequence starts anew."""
        if (state := self._states.get(history.seq_id)) is None:
            return
        state.owed_s += max(0.0, cpu_s - _WARM_S)
        if state.owed_s >= _CHARGED_S:
            has_room = self._grammars.worked(state.compiled, state.owed_s)
            state.owed_s = 0.0
            if not has_room:
                self._start_anew(history)

    def _fill(self, history: TokenHistory, bits: Bits, address: int) -> None:
        """Writes the mask of a row into `bits`, whose memory is at `address`."""
        try:
            return self._write(history, bits, address)
        except _Failed:
            # Other sequences of the same grammar may have caused the failure. A new matcher fails only for this
            # sequence's own reasons.
            self._start_anew(history)
        try:
            self._write(history, bits, address)
        except _Failed as error:
            self._start_anew(history)
            raise _Ended(f"the constraint cannot go on: {error}") from None

    def _write(self, history: TokenHistory, bits: Bits, address: int) -> None:
        matcher = self._matcher(history)
        _check(matcher)
        matcher.unsafe_compute_mask_ptr(address, bits.nbytes)
        _check(matcher)
        if history.params.ignore_eos and _clear(bits, self._eos) and not bits.any():
            raise _Ended(COMPLETE)
        if not self._others.narrow(history, bits, self._grammars.num_ids):
            raise _Ended("allowed_token_ids and bad_words leave no token that the constraint allows")

    def _matcher(self, history: TokenHistory) -> Matcher:
        """A matcher that has been given the output so far, or has failed at it."""
        state = self._states.get(history.seq_id)
        count = history.num_output - len(history.drafts)
        # Another list of tokens; or a step that had added a token was interrupted.
        if state is None or state.tokens is not history.tokens or state.count > count:
            compiled = self._grammars.begin(history.params.grammar, history.cache_salt)
            try:
                fresh = compiled.result().deep_copy()
            except GrammarError as error:
                raise _Ended(str(error)) from None
            state = self._states[history.seq_id] = _State(history.tokens, 0, fresh, compiled)
        while state.count < count:
            new = history.output_from(state.count)[: min(count - state.count, _MOST_AT_ONCE)]
            if not self._consume(state, new):
                return state.matcher
        if not history.drafts:
            return state.matcher
        ahead = state.matcher.deep_copy()
        ahead.consume_tokens(list(history.drafts))
        return ahead

    def _start_anew(self, history: TokenHistory) -> None:
        """Drops a state, and the compiled grammar that it was copied from."""
        state = self._states.pop(history.seq_id)
        self._grammars.forget(history.params.grammar, history.cache_salt, state.compiled)

    def _forget(self, histories: Mapping[int, TokenHistory]) -> None:
        """Bounds the states kept of sequences that have ended or wait: as many as run now, plus _MOST_IDLE."""
        if len(self._states) > 2 * len(histories) + _MOST_IDLE:
            now = {history.seq_id for history in histories.values()}
            self._states = {seq_id: state for seq_id, state in self._states.items() if seq_id in now}


def _check(matcher: Matcher) -> None:
    if matcher.is_error():
        lines = str(matcher.get_error()).splitlines() or ["no reason is known"]
        raise _Failed(lines[0][:300])
    if matcher.is_stopped():
        raise _Ended(COMPLETE)


def _has(bits: Bits, token: int) -> bool:
    return token // _WORD_BITS < len(bits) and bool(int(bits[token // _WORD_BITS]) >> token % _WORD_BITS & 1)


def _clear(bits: Bits, ids: list[int]) -> bool:
    """Clears the bits of some ids; True if any was set."""
    found = [token for token in ids if _has(bits, token)]
    for token in found:
        bits[token // _WORD_BITS] ^= np.uint32(1 << token % _WORD_BITS)
    return bool(found)
