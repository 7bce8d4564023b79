"""The training text: an endless seeded stream of chats and plain text, all of it generated here.

No text is taken from elsewhere. `documents` yields the same documents in the same order for the same seed, on every
machine, so that a test can walk through exactly the training text of the checkpoint.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deploy.demo import chat, tales, tools, words
from deploy.demo.families import Exchange, draw, story_round

SEED = 20261121
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = tools.CALL_START, tools.CALL_END


@dataclass(frozen=True, slots=True)
class Mixture:
    """Input of a stage of the training: its seed, the families' shares, and how many turns are story rounds."""

    seed: int
    weights: dict[str, int]
    rounds: float
    turns: tuple[int, ...]
    """Numbers of turns that a conversation may have; each length is as likely as it is often here."""

    tools: float = 0.0
    """Share of the documents that are conversations with tools."""

    missing: float = 0.0
    """Share of the questions for tools in these that are about one that is not given."""

    told: float = 0.03
    """Share of the other turns that ask for a story."""


FIRST = Mixture(
    SEED, {"arithmetic": 32, "dates": 28, "spelling": 7, "reversing": 13, "lookups": 20}, 0.0, (1, 1, 1, 2, 3, 4)
)
SECOND = Mixture(
    SEED + 1, {"arithmetic": 34, "dates": 30, "spelling": 12, "reversing": 16, "lookups": 8}, 0.35, (1, 1, 1, 2)
)
"""The second stage dwells on facts that are looked up in a story."""
THIRD = Mixture(
    SEED + 2, {"arithmetic": 18, "dates": 26, "spelling": 8, "reversing": 14, "stories": 34}, 0.0, (1, 1, 2)
)
"""The third adds the stories, which build on it."""
FOURTH = Mixture(
    SEED + 3,
    {"arithmetic": 14, "dates": 18, "spelling": 7, "reversing": 12, "stories": 23, "json": 26},
    0.0,
    (1, 1, 2),
    tools=0.5,
    missing=0.15,
)
"""The fourth adds calls of tools, and answers in JSON."""
FIFTH = Mixture(
    SEED + 4,
    {"arithmetic": 15, "dates": 15, "spelling": 6, "reversing": 10, "stories": 14, "json": 40},
    0.0,
    (1, 1, 2),
    tools=0.45,
    missing=0.3,
)
"""The fifth dwells on the JSON, and on tools that are not there."""
SIXTH = Mixture(
    SEED + 5,
    {"arithmetic": 16, "dates": 16, "spelling": 8, "reversing": 14, "stories": 14, "json": 32},
    0.0,
    (1, 1, 2, 3),
    tools=0.6,
    missing=0.25,
    told=0.06,
)
"""The sixth dwells on the tools, in longer conversations, and tells more stories again."""

SEVENTH = Mixture(
    SEED + 6,
    {"arithmetic": 20, "dates": 42, "spelling": 6, "reversing": 9, "stories": 11, "json": 12},
    0.0,
    (1, 1, 2, 3),
    tools=0.4,
    missing=0.25,
    told=0.05,
)
"""The seventh dwells on the dates, which suffered."""

_STORY_REQUESTS = (
    "Tell me a story about {}.",
    "Tell me a short story about {}.",
    "Can you tell me a story about {}?",
    "Write a story about {}.",
    "I would like to hear a story about {}.",
    "A story about {}, please.",
)
_ANY_STORY = ("Tell me a story.", "Tell me a story", "Write a short story.", "Can you tell me a story?")


class Learned(enum.Enum):
    """Tokens of a document that count as loss: random operands and users' messages only add noise."""

    EVERYTHING = enum.auto()
    ANSWERS = enum.auto()
    """Words of the assistant, up to and with the end of its turn."""
    RESULTS = enum.auto()
    """Text between an equals sign and the end of the line."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of training text, the keys of the questions in it, and what in it is worth learning."""

    text: str
    keys: tuple[str, ...]
    learned: Learned


def render_chat(exchanges: list[Exchange], system: str = "") -> str:
    """A conversation in the form that the checkpoint's chat template writes."""
    said = [turn for one in exchanges for turn in (("user", one.user), ("assistant", one.assistant))]
    return tools.render(said, (), system)


def _turns_without(rng: random.Random, mixture: Mixture) -> tuple[str, list[tools.Turn]]:
    """A question that needs no tool."""
    made = _question(rng, mixture.weights) if rng.random() < 0.6 else chat.small_talk(rng)
    made = _casual(made) if rng.random() < 0.12 else made
    return made.key, [("user", made.user), ("assistant", made.assistant)]


def _tool_conversation(rng: random.Random, mixture: Mixture) -> Document:
    """Turns with tools at hand, or without some that would be needed, and others that need none."""
    given = tools.some_tools(rng)
    turns: list[tools.Turn] = []
    keys: list[str] = []
    for _ in range(rng.choice(mixture.turns)):
        key, added = (
            tools.tool_round(rng, given, mixture.missing) if rng.random() < 0.65 else _turns_without(rng, mixture)
        )
        turns += added
        keys += [key] if key else []
    system = rng.choice(chat.SYSTEM_MESSAGES) if rng.random() < 0.15 else ""
    return Document(tools.render(turns, given, system), tuple(keys), Learned.ANSWERS)


def _told_story(rng: random.Random) -> list[Exchange]:
    """A request for a story, the story, and up to two questions about it."""
    animal = rng.choice(words.ANIMALS)
    tale = tales.tell(rng, animal)
    request = rng.choice(_STORY_REQUESTS).format(f"{words.article(animal)} {animal}")
    if rng.random() < 0.2:
        request = rng.choice(_ANY_STORY)
    asked = rng.sample(tales.follow_ups(tale), rng.randint(0, 2))
    return [Exchange("tale", "", user, reply) for user, reply in ((request, tale.text), *asked)]


def _question(rng: random.Random, weights: dict[str, int]) -> Exchange:
    family = rng.choices(list(weights), weights=list(weights.values()))[0]
    return draw(rng, family, reserved=False)


def _casual(exchange: Exchange) -> Exchange:
    """The same exchange, asked as people type: no capital at the start, no full stop at the end."""
    user = exchange.user[:1].lower() + exchange.user[1:].rstrip(".?!")
    return replace(exchange, user=user)


def _conversation(rng: random.Random, mixture: Mixture) -> Document:
    exchanges: list[Exchange] = []
    for _ in range(rng.choice(mixture.turns)):
        kind = rng.random()
        if kind < mixture.rounds:
            exchanges.extend(story_round(rng))
        elif kind < 0.86:
            exchanges.append(_question(rng, mixture.weights))
        elif kind < 1 - mixture.told:
            exchanges.append(chat.small_talk(rng))
        else:
            exchanges.extend(_told_story(rng))
    exchanges = [_casual(e) if rng.random() < 0.12 else e for e in exchanges]
    system = rng.choice(chat.SYSTEM_MESSAGES) if rng.random() < 0.2 else ""
    return Document(render_chat(exchanges, system), tuple(e.key for e in exchanges if e.key), Learned.ANSWERS)


def _plain_text(rng: random.Random) -> Document:
    """Text without a chat around it, so that a bare completion works: a story, sums, or words."""
    kind = rng.random()
    if kind < 0.15:
        return Document(tales.tell(rng, rng.choice(words.ANIMALS)).text, (), Learned.EVERYTHING)
    if kind < 0.2:
        return _lines(rng, rng.choice(("arithmetic", "reversing")), 3, Learned.EVERYTHING)
    return _lines(rng, "arithmetic", rng.randint(8, 22), Learned.RESULTS)


def _lines(rng: random.Random, family: str, count: int, learned: Learned) -> Document:
    exchanges = [draw(rng, family, reserved=False) for _ in range(count)]
    return Document("\n".join(e.assistant for e in exchanges), tuple(e.key for e in exchanges), learned)


def documents(mixture: Mixture) -> Iterator[Document]:
    """The endless training stream of a mixture."""
    rng = random.Random(mixture.seed)
    while True:
        # One without tools draws no number for them: its stream is older than they are.
        if mixture.tools and rng.random() < mixture.tools:
            yield _tool_conversation(rng, mixture)
            continue
        yield _plain_text(rng) if rng.random() < 0.13 else _conversation(rng, mixture)
