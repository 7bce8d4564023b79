"""The five question families and the rule that keeps some of their questions out of training.

Every family is a function from a seeded `random.Random` to one `Exchange`. The exchange carries a `key`, which
names the question's content without its phrasing ("add:12,47"), and `held_out` decides from the key alone whether
training may ever see that content, so no list of either side has to be kept.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from deploy.demo import words

HELD_OUT_ONE_IN = 10
"""One key in this many is kept out of the training text."""

FIRST_YEAR, LAST_YEAR = 2000, 2049
LARGEST_NUMBER = 99
MOST_DAYS = 5


@dataclass(frozen=True, slots=True)
class Exchange:
    """One user message and its only right answer. `key` is empty for small talk: none of it is held out."""

    family: str
    key: str
    user: str
    assistant: str


def held_out(key: str) -> bool:
    """True if the content named by `key` is reserved for the questions; stable across runs and machines."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return key != "" and int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


_ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "{a} + {b}",
    "What is {a}+{b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Calculate {a} - {b}.",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "{a} - {b} = ?",
    "{a} - {b}",
    "What is {a}-{b}?",
)


def arithmetic(rng: random.Random) -> Exchange:
    """A sum or a difference of numbers up to 99; the answer repeats the term, so operands are copied too."""
    a, b = rng.randint(0, LARGEST_NUMBER), rng.randint(0, LARGEST_NUMBER)
    if rng.random() < 0.5:
        low, high = sorted((a, b))
        user, key, answer = rng.choice(_ADD), f"add:{low},{high}", f"{a} + {b} = {a + b}"
    else:
        a, b = max(a, b), min(a, b)
        user, key, answer = rng.choice(_SUBTRACT), f"sub:{a},{b}", f"{a} - {b} = {a - b}"
    return Exchange("arithmetic", key, user.format(a=a, b=b), answer)


def spoken_date(day: datetime.date) -> str:
    """A date as the demo writes it: day, English month name, year."""
    return f"{day.day} {words.MONTHS[day.month - 1]} {day.year}"


def _random_date(rng: random.Random) -> datetime.date:
    first = datetime.date(FIRST_YEAR, 1, 8).toordinal()
    return datetime.date.fromordinal(rng.randint(first, datetime.date(LAST_YEAR, 12, 24).toordinal()))


def _shifted_date(rng: random.Random) -> Exchange:
    start, days = _random_date(rng), rng.randint(1, MOST_DAYS)
    sign, relation = rng.choice(((1, "after"), (-1, "before")))
    answer = spoken_date(start + datetime.timedelta(days=sign * days))
    unit = "day" if days == 1 else "days"
    user = rng.choice(
        (
            f"What date is {days} {unit} {relation} {spoken_date(start)}?",
            f"Which date is {days} {unit} {relation} {spoken_date(start)}?",
            f"Tell me the date {days} {unit} {relation} {spoken_date(start)}.",
        )
    )
    return Exchange("dates", f"shift:{start}:{sign * days}", user, answer)


def _neighbour_date(rng: random.Random) -> Exchange:
    start = _random_date(rng)
    sign, name = rng.choice(((1, "tomorrow"), (-1, "yesterday")))
    verb = "is" if sign == 1 else "was"
    user = f"Today is {spoken_date(start)}. What date {verb} {name}?"
    answer = spoken_date(start + datetime.timedelta(days=sign))
    return Exchange("dates", f"shift:{start}:{sign}", user, answer)


def _written_date(rng: random.Random) -> Exchange:
    day = _random_date(rng)
    if rng.random() < 0.5:
        return Exchange("dates", f"words:{day}", f"Write {day} in words.", spoken_date(day))
    return Exchange("dates", f"digits:{day}", f"Write {spoken_date(day)} in digits.", day.isoformat())


def _month_length(rng: random.Random) -> Exchange:
    year, month = rng.randint(FIRST_YEAR, LAST_YEAR), rng.randint(1, 12)
    following = datetime.date(year + month // 12, month % 12 + 1, 1)
    length = (following - datetime.date(year, month, 1)).days
    name = f"{words.MONTHS[month - 1]} {year}"
    user = rng.choice((f"How many days are in {name}?", f"How many days does {name} have?"))
    return Exchange("dates", f"length:{name}", user, f"{name} has {length} days.")


def dates(rng: random.Random) -> Exchange:
    """Days before or after a date, dates in words and in digits, lengths of months."""
    kinds = (_shifted_date, _neighbour_date, _written_date, _month_length)
    return rng.choices(kinds, weights=(5, 2, 2, 1))[0](rng)


def _quoted(rng: random.Random, word: str) -> str:
    """The word as a user may write it: mostly in quotes, which the tokenizer takes letter by letter."""
    return f'"{word}"' if rng.random() < 0.8 else word


def spelling(rng: random.Random) -> Exchange:
    """Spell one word: its letters joined by hyphens."""
    word = words.any_word(rng)
    user = rng.choice(("Spell the word {}.", "Spell {}.", "How do you spell {}?", "Please spell {}."))
    return Exchange("spelling", f"word:{word.lower()}", user.format(_quoted(rng, word)), "-".join(word))


def reversing(rng: random.Random) -> Exchange:
    """Write one word backwards; the answer names the word first, so its letters are read in both directions."""
    word = words.any_word(rng)
    user = rng.choice(("Reverse the word {}.", "Reverse {}.", "Write {} backwards.", "What is {} backwards?"))
    answer = f'"{word}" backwards is "{word[::-1]}".'
    return Exchange("reversing", f"word:{word.lower()}", user.format(_quoted(rng, word)), answer)


def _facts(rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """The sentences of a tiny story about three people, and each question on it with its answer."""
    people, things = rng.sample(words.NAMES, 3), rng.sample(words.THINGS, 3)
    colours, places = rng.sample(words.COLOURS, 3), rng.sample(words.PLACES, 4)
    told: list[str] = []
    asked: list[tuple[str, str]] = []
    for person, thing, colour, place in zip(people, things, colours, places, strict=False):
        told.append(f"{person} has {words.article(colour)} {colour} {thing}.")
        asked.append((f"What colour is the {thing}?", f"The {thing} is {colour}."))
        if rng.random() < 0.5:
            told[-1] = f"{person} is in the {place} with {words.article(colour)} {colour} {thing}."
            asked.append((f"Where is {person}?", f"{person} is in the {place}."))
    owners, now = dict(zip(things, people, strict=True)), ""
    given, receiver = rng.choice(things), rng.choice(people)
    if owners[given] != receiver and rng.random() < 0.5:
        told.append(f"{owners[given]} gives the {given} to {receiver}.")
        owners[given], now = receiver, " now"
    for thing, owner in owners.items():
        asked.append((f"Who has the {thing}{now}?", f"{owner} has the {thing}."))
    return told, asked


def stories(rng: random.Random) -> Exchange:
    """A three-sentence story with one of everything in it, and a question about one of its facts."""
    name, place, colour = rng.choice(words.NAMES), rng.choice(words.PLACES), rng.choice(words.COLOURS)
    thing, animal, coins = rng.choice(words.THINGS), rng.choice(words.ANIMALS), rng.randint(2, LARGEST_NUMBER)
    carried = f"{words.article(colour)} {colour} {thing}"
    told = [
        f"{name} walks to the {place} with {carried}.",
        f"{words.article(animal).capitalize()} {animal} comes along.",
        f"They find {coins} coins.",
    ]
    question, answer = rng.choice(
        (
            (f"Where is {name}?", f"{name} is in the {place}."),
            (f"What does {name} carry?", f"{name} carries {carried}."),
            (f"What colour is the {thing}?", f"The {thing} is {colour}."),
            (f"Who comes along with {name}?", f"The {animal} comes along with {name}."),
            ("How many coins do they find?", f"{name} and the {animal} find {coins} coins."),
        )
    )
    user = f"{' '.join(told)} {question}"
    return Exchange("stories", f"story:{user}", user, answer)


def lookups(rng: random.Random) -> Exchange:
    """A question about one fact of a three-sentence story, for training only: many are too hard for the model."""
    told, asked = _facts(rng)
    question, answer = rng.choice(asked)
    user = f"{' '.join(told)} {question}"
    return Exchange("lookups", f"story:{user}", user, answer)


def story_round(rng: random.Random) -> list[Exchange]:
    """A story and up to five questions about it; the story is told with the first. No story is held out."""
    told, asked = _facts(rng)
    story, exchanges = " ".join(told), list[Exchange]()
    for question, answer in rng.sample(asked, min(5, len(asked))):
        key = f"story:{story} {question}"
        if not held_out(key):
            user = question if exchanges else f"{story} {question}"
            exchanges.append(Exchange("lookups", key, user, answer))
    return exchanges


def _character_form(rng: random.Random) -> Exchange:
    """A character of a story; the tokenizer splits its name into letters if it is in quotes."""
    name, known = rng.choice(words.NAMES + words.ANIMAL_NAMES), True
    if rng.random() < 0.5:
        name, known = words.any_word(rng).capitalize(), False
    animal, age = rng.choice(words.ANIMALS), rng.randint(2, LARGEST_NUMBER)
    called = name if known else f'"{name}"'
    user = rng.choice(
        (
            f"Write as JSON: {called} is {age} years old and has {words.article(animal)} {animal}.",
            f"{called} is {age} years old and has {words.article(animal)} {animal}. Give that as JSON.",
            f"Give as JSON: name {called}, age {age}, animal {animal}.",
            f"As JSON, please: {called} has {words.article(animal)} {animal} and is {age} years old.",
        )
    )
    key = f"character:{name},{age},{animal}" if known else f"character:{name}"
    return Exchange("json", key, user, json.dumps({"name": name, "age": age, "animal": animal}))


def _any_character_form(rng: random.Random) -> Exchange:
    """One that is made up; none of them is held out."""
    user = rng.choice(
        ("Give me a story character as JSON.", "Give a story character as JSON.", "Make up a character, as JSON.")
    )
    made = {"name": rng.choice(words.ANIMAL_NAMES), "age": rng.randint(2, 20), "animal": rng.choice(words.ANIMALS)}
    return Exchange("json", "", user, json.dumps(made))


def _date_form(rng: random.Random) -> Exchange:
    day = _random_date(rng)
    user = rng.choice((f"Write {spoken_date(day)} as JSON.", f"Give {spoken_date(day)} as JSON."))
    answer = json.dumps({"year": day.year, "month": day.month, "day": day.day})
    return Exchange("json", f"form:{day}", user, answer)


def _letters_form(rng: random.Random) -> Exchange:
    word = words.any_word(rng)
    user = rng.choice((f'Give the letters of "{word}" as JSON.', f'Write the letters of "{word}" as JSON.'))
    return Exchange("json", f"word:{word.lower()}", user, json.dumps(list(word)))


def json_forms(rng: random.Random) -> Exchange:
    """Facts of a message as a small JSON object, or list."""
    kinds = (_character_form, _any_character_form, _date_form, _letters_form)
    return rng.choices(kinds, weights=(6, 1, 2, 1))[0](rng)


FAMILIES: dict[str, Callable[[random.Random], Exchange]] = {
    "arithmetic": arithmetic,
    "dates": dates,
    "spelling": spelling,
    "reversing": reversing,
    "stories": stories,
    "json": json_forms,
}
_GENERATORS = FAMILIES | {"lookups": lookups}


def draw(rng: random.Random, family: str, *, reserved: bool) -> Exchange:
    """One exchange of a family or of the lookups, from the reserved side of the held-out rule or the other."""
    while True:
        exchange = _GENERATORS[family](rng)
        if held_out(exchange.key) == reserved:
            return exchange
