"""The one stream that a sequence can have: a pure function of its tokens, salt, seed and choice, and its end."""

from __future__ import annotations

from dataclasses import dataclass

from common.config import Config
from worker.engine.sequence import EndReason, Sequence

_PRIME = (1 << 61) - 1
_BASE = 0x1D4E5F60718293A5 % _PRIME
_MASK = (1 << 64) - 1
EOS = 0


@dataclass(frozen=True)
class TokenModel:
    """The pure function that stands for a language model.

    Attributes:
        vocab_size: tokens are in [0, vocab_size); few, so that prefixes meet.
        eos_every: about one token in so many is EOS.
        draft_errors: about one draft in so many is wrong; 1 makes all wrong, 0 none.
    """

    vocab_size: int = 24
    eos_every: int = 60
    draft_errors: int = 3

    def token(self, state: int, seed: int, choice: int) -> int:
        """What follows the prefix with hash `state`."""
        x = self._noise(state, seed * 8 + choice)
        return EOS if (x >> 40) % self.eos_every == 0 else 1 + x % (self.vocab_size - 1)

    def draft(self, state: int, token: int) -> int:
        """What a draft model says where `token` is right."""
        wrong = self.draft_errors and (self._noise(state, 77) >> 40) % self.draft_errors == 0
        return (token + 1) % self.vocab_size if wrong else token

    def drafts(self, truth: Truth, length: int, k: int) -> list[int]:
        """What it says behind the first `length` tokens: k drafts, sometimes fewer. `truth` has to reach as far."""
        count = min(k, self._noise(truth.state_before(length), 99) % (2 * k + 1)) if k else 0
        positions = range(length, length + count)
        return [self.draft(truth.state_before(p), truth.tokens[p]) for p in positions]

    def _noise(self, state: int, salt: int) -> int:
        x = (state * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03 + 1) & _MASK
        x = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
        return x ^ (x >> 32)


def fold(state: int, token: int) -> int:
    """Hash of a prefix that is one token longer."""
    return (state * _BASE + token + 1) % _PRIME


def root_of(seq: Sequence) -> int:
    """Hash of the empty prefix: KV computed under another salt or adapter is other KV."""
    root = 1 if seq.hash_root is None else fold(2, seq.hash_root)
    return fold(root, int.from_bytes(seq.cache_salt) + 1) if seq.cache_salt else root


class Truth:
    """The one stream that a sequence can have, and where it ends.

    Attributes:
        tokens: prompt and output, as far as they were asked for.
        states: `states[p]` is the hash of the prefix up to and with position p.
        end: tokens in all when the sequence ends by itself.
        finish_reason, end_reason: how it does.
    """

    def __init__(self, seq: Sequence, model: TokenModel, max_model_len: int, config: Config) -> None:
        self._model = model
        self._seed, self._choice = seq.seed, seq.choice
        self._state = self._root = root_of(seq)
        self.tokens: list[int] = []
        self.states: list[int] = []
        for token in seq.token_ids:
            self._push(token)
        self.end, (self.finish_reason, self.end_reason) = self._find_end(seq, max_model_len, config)

    def upto(self, length: int) -> None:
        """Makes sure that `length` tokens are there."""
        while len(self.tokens) < length:
            self._push(self._model.token(self._state, self._seed, self._choice))

    def state_before(self, position: int) -> int:
        """Hash of the prefix in front of a position."""
        return self.states[position - 1] if position else self._root

    def _push(self, token: int) -> None:
        self._state = fold(self._state, token)
        self.tokens.append(token)
        self.states.append(self._state)

    def _find_end(self, seq: Sequence, max_model_len: int, config: Config) -> tuple[int, tuple[str, EndReason]]:
        length = len(self.tokens)
        while True:
            self.upto(length)
            end = _end_at(self.tokens[:length], seq, max_model_len, config)
            if end is not None:
                return length, end
            length += 1


def _end_at(tokens: list[int], seq: Sequence, max_model_len: int, config: Config) -> tuple[str, EndReason] | None:
    """The stop rules in their order, for one moment."""
    params, output, last = seq.sampling_params, tokens[seq.num_prompt_tokens :], tokens[-1]
    if output and len(output) >= params.min_tokens:
        for stop in map(list, params.stop_token_sequences):
            if len(output) >= len(stop) and output[-len(stop) :] == stop:
                return "stop_sequence", EndReason.STOP_SEQUENCE
        if not params.ignore_eos and last == config.eos_token_id:
            return "eos", EndReason.EOS
        if not params.ignore_eos and last in config.stop_token_ids:
            return f"stop_{last}", EndReason.EOS
        if last in params.stop_token_ids:
            return f"stop_{last}", EndReason.STOP_TOKEN
    if len(output) >= params.max_tokens or len(tokens) >= max_model_len:
        return "max_tokens", EndReason.LENGTH
    return None
