"""The word lists of the demo's corpus, and its made-up words. All of them were written for this project."""

from __future__ import annotations

import random

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
NAMES = (
    *("Mia", "Tom", "Lena", "Omar", "Ravi", "Nora", "Finn", "Aiko", "Sam", "Ines", "Paul", "Zoe"),
    *("Kofi", "Ruth", "Hugo", "Vera", "Emil", "Clara", "Ivan", "Dina"),
)
THINGS = (
    *("ball", "kite", "book", "lamp", "drum", "cup", "hat", "key", "boat", "bell", "coin", "map"),
    *("rope", "shell", "spoon", "scarf"),
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "orange", "purple")
PLACES = (
    *("garden", "kitchen", "forest", "market", "library", "harbour", "attic", "cellar", "barn", "meadow"),
    *("tower", "school"),
)
ANIMALS = (
    *("fox", "owl", "bear", "mouse", "rabbit", "cat", "dog", "frog", "otter", "hedgehog", "squirrel", "goat"),
    *("duck", "wolf", "turtle", "robot", "dragon", "penguin"),
)
ANIMAL_NAMES = (
    *("Pip", "Juno", "Bram", "Lila", "Otto", "Wren"),
    *("Milo", "Tess", "Nico", "Fern", "Basil", "Hazel"),
)

REAL_WORDS = (
    *("apple", "banana", "bottle", "bridge", "butter", "candle", "carpet", "castle", "cherry", "circle"),
    *("cloud", "coffee", "copper", "cotton", "dinner", "doctor", "engine", "farmer", "finger", "flower"),
    *("friend", "guitar", "hammer", "hello", "honey", "island", "jacket", "jungle", "ladder", "lemon"),
    *("letter", "light", "lizard", "magnet", "marble", "melon", "mirror", "monkey", "morning", "mountain"),
    *("needle", "night", "number", "ocean", "onion", "orange", "paper", "parrot", "pencil", "pepper"),
    *("picture", "pillow", "planet", "pocket", "potato", "pumpkin", "puzzle", "python", "river", "rocket"),
    *("salmon", "school", "server", "shadow", "silver", "singer", "spider", "spring", "station", "stone"),
    *("storm", "summer", "sunset", "table", "tiger", "tomato", "train", "turtle", "valley", "velvet"),
    *("violin", "water", "whisper", "window", "winter", "wizard", "world", "yellow", "zebra", "token"),
)

_ONSETS = ("b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "y", "z", "")
_PAIRS = ("br", "ch", "cl", "dr", "fl", "gr", "pl", "qu", "sh", "sl", "sp", "st", "th", "tr", "wh")
_VOWELS = ("a", "e", "i", "o", "u", "ee", "oo", "ai", "ou", "a", "e", "i", "o")
_CODAS = ("", "", "", "n", "r", "s", "t", "l", "m", "d", "k", "p", "ck", "ll", "ng", "nd", "x", "g", "b")
_LONGEST, _SHORTEST = 8, 3


def article(noun: str) -> str:
    """ "a" or "an", whichever goes before the noun."""
    return "an" if noun[0] in "aeiou" else "a"


def _syllable(rng: random.Random) -> str:
    onset = rng.choice(_PAIRS) if rng.random() < 0.25 else rng.choice(_ONSETS)
    return onset + rng.choice(_VOWELS) + rng.choice(_CODAS)


def any_word(rng: random.Random) -> str:
    """A word to spell or to reverse, 3 to 8 letters: mostly made up, sometimes from the dictionary."""
    word = ""
    if rng.random() < 0.15:
        word = rng.choice(REAL_WORDS)
    while not _SHORTEST <= len(word) <= _LONGEST:
        word = "".join(_syllable(rng) for _ in range(rng.randint(1, 3)))
    return word.capitalize() if rng.random() < 0.1 else word
