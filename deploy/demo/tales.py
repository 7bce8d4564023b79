"""Longer text: little animal stories from a grammar, for asking in chat, for follow-ups and as plain text."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deploy.demo import words

_HOMES = (
    "in a small house by the river",
    "under an old oak tree",
    "at the edge of a quiet forest",
    "on a green hill near the sea",
    "in a warm barn behind the market",
)
_MOODS = ("curious", "brave", "gentle", "clever", "shy")
_WISHES = (
    ("find the silver bell", "rang the silver bell, and the whole valley heard it"),
    ("see the ocean", "stood by the ocean and watched the waves until the sun went down"),
    ("bake a honey cake", "baked a honey cake and shared it with everyone who came by"),
    ("build a little boat", "built a little boat and sailed it all the way to the island"),
    ("learn a new song", "learned a new song and sang it every evening under the stars"),
    ("plant a garden", "planted a garden and gave the first flowers to a friend"),
)
_TROUBLES = (
    "But a cold wind began to blow, and the path was lost in the fog.",
    "But the bridge was broken, and the water was deep.",
    "But the night was dark, and every road looked the same.",
    "But it rained for three days, and nobody knew what to do.",
)
_HELPS = (
    "brought a bright lamp",
    "knew a secret path",
    "had a strong rope",
    "carried a map of the hills",
)
_ENDINGS = (
    "From that day on they were the best of friends.",
    "They laughed all the way home.",
    "And that night they slept very well.",
)


@dataclass(frozen=True, slots=True)
class Tale:
    """A finished story, and what follow-up questions need to know of it."""

    text: str
    animal: str
    name: str
    home: str
    wish: str
    helper: str
    helper_name: str


def tell(rng: random.Random, animal: str) -> Tale:
    """A story about the given animal, some 110 words long."""
    helper = rng.choice([other for other in words.ANIMALS if other != animal])
    name, helper_name = rng.sample(words.ANIMAL_NAMES, 2)
    mood, home, (wish, ending) = rng.choice(_MOODS), rng.choice(_HOMES), rng.choice(_WISHES)
    text = (
        f"Once upon a time there was {words.article(mood)} {mood} {animal} named {name}. "
        f"{name} lived {home}. Every morning {name} dreamed of one thing: to {wish}. "
        f"One day {name} packed a small bag and set out. {rng.choice(_TROUBLES)} "
        f"Then {name} met {words.article(helper)} {helper} named {helper_name}, who {rng.choice(_HELPS)}. "
        f'"Do not worry," said {helper_name}. "We will do it together." '
        f"So they went on side by side, and at last {name} {ending}. {rng.choice(_ENDINGS)}"
    )
    return Tale(text, animal, name, home, wish, helper, helper_name)


def follow_ups(tale: Tale) -> list[tuple[str, str]]:
    """Questions that a listener may ask about a story, with their answers."""
    helper = f"{words.article(tale.helper)} {tale.helper}"
    return [
        (f"What was the name of the {tale.animal}?", f"The {tale.animal} was named {tale.name}."),
        (f"Where did {tale.name} live?", f"{tale.name} lived {tale.home}."),
        (f"Where did the {tale.animal} live?", f"The {tale.animal} lived {tale.home}."),
        (f"Who helped {tale.name}?", f"{tale.helper_name} helped {tale.name}."),
        (f"Who helped the {tale.animal}?", f"{tale.helper_name} helped the {tale.animal}."),
        (f"Who is {tale.helper_name}?", f"{tale.helper_name} is {helper} who helped {tale.name}."),
        (f"What did {tale.name} want?", f"{tale.name} wanted to {tale.wish}."),
    ]
