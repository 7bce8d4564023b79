"""Philox4x32-10 against Random123's known answers, and the counter's layout."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.philox import DOMAIN, all_token_words, philox4x32, token_words

# kat_vectors of Random123 1.14: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c, k = words(counter), words(key)
    out = philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert " ".join(f"{int(word[0]):08x}" for word in out) == expected


def test_domain_is_fsl1() -> None:
    assert DOMAIN.to_bytes(4, "big") == b"FSL1"


def test_word_of_a_token_has_the_documented_counter() -> None:
    seed, position, choice, token = 0x1234567890ABCDEF, 1000, 3, 1234567
    counter = [np.array([v], np.uint64) for v in (token >> 2, position, choice, DOMAIN)]
    key = [np.array([v], np.uint64) for v in (seed & 0xFFFFFFFF, seed >> 32)]
    block = philox4x32((counter[0], counter[1], counter[2], counter[3]), (key[0], key[1]))
    one = (np.array([v], np.uint64) for v in (seed, position, choice))
    assert token_words(np.array([token]), *one)[0] == block[token & 3][0]


@pytest.mark.parametrize("vocab_size", [1, 4, 5, 1023])
def test_words_of_all_tokens_equal_single_tokens(vocab_size: int) -> None:
    seeds, positions, choices = (np.array(v, np.uint64) for v in ([7, 2**64 - 1], [0, 2**31], [0, 127]))
    everything = all_token_words(vocab_size, seeds, positions, choices)
    assert everything.shape == (2, vocab_size)
    for row in range(2):
        ids = np.arange(vocab_size)
        repeated = (np.full(vocab_size, x[row], np.uint64) for x in (seeds, positions, choices))
        assert (everything[row] == token_words(ids, *repeated)).all()
