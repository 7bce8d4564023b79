"""Masks of grammars: allowed outputs are valid, and masks depend on grammar and output alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from common.constraints import library
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from common.params.sampling_params import SamplingParams
from common.text.tokenizer import Tokenizer
from tests.schemas import random_schema
from worker.engine.batch import TokenHistory
from worker.grammars import GrammarError, Grammars, grammars_to_check, model_grammars
from worker.model import grammar_masks
from worker.model.grammar_masks import COMPLETE, GrammarMasks
from worker.model.logit_masks import LogitMasks
from worker.model.text_ahead import TextAhead

DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"
TOKENIZER = Tokenizer.from_folder(DEMO)
EOS = frozenset({next(id for id, name in TOKENIZER.added_tokens.items() if name == "<|im_end|>")})
(END,) = EOS
# A model's matrix has more rows than its tokenizer has ids.
SIZE = 1060
TEXTS = TOKENIZER.token_bytes()
CHECKER = GrammarChecker(TOKENIZER.added_tokens, EOS)


@cache
def grammars() -> Grammars:
    return model_grammars(TOKENIZER, SIZE, EOS)


def grammar_of(given: Any) -> str:
    return CHECKER.check(Constraint.of(given), optional_space=False)


def new_masks() -> GrammarMasks:
    return GrammarMasks(grammars(), LogitMasks(EOS), EOS)


def history(output: list[int], params: SamplingParams, seq_id: int = 1) -> TokenHistory:
    return TokenHistory(seq_id, params, np.empty(0, np.int64), output, 0, len(output))


def allowed(masks: GrammarMasks, output: list[int], params: SamplingParams, seq_id: int = 1) -> list[int] | str:
    """Ids that may come next; or why none can."""
    bits, ended = masks.confined({3: history(output, params, seq_id)})
    if ended:
        assert bits is None
        assert list(ended) == [3]
        return ended[3]
    assert bits is not None
    assert bits.rows.tolist() == [3]
    return np.flatnonzero(np.unpackbits(bits.bits[0].view(np.uint8), bitorder="little")).tolist()


def params_of(given: Any, **others: Any) -> SamplingParams:
    return SamplingParams(grammar=grammar_of(given), **others)


def text_of(output: list[int]) -> str:
    return b"".join(TEXTS[token] for token in output if token != END).decode()


def walk(rnd: random.Random, params: SamplingParams, most: int = 120) -> tuple[list[int], str | None]:
    """A random output and the reason of its end: `COMPLETE` also after an end-of-sequence token; None without an end.

    At each position the mask is that of a fresh state with the whole output.
    """
    masks, output = new_masks(), list[int]()
    while len(output) < most:
        found = allowed(masks, output, params)
        if not len(output) % 29 or isinstance(found, str):
            assert found == allowed(new_masks(), output, params)
        if isinstance(found, str):
            return output, found
        assert found
        assert max(found) < TOKENIZER.vocab_size
        token = choose(rnd, found)
        output.append(token)
        if token == END:
            return output, COMPLETE
    return output, None


def choose(rnd: random.Random, found: list[int]) -> int:
    """One of them: mostly one that leads to an end soon."""
    if END in found and rnd.random() < 0.5:
        return END
    closing = [token for token in found if set(TEXTS[token]) & set(b'"]}0')]
    some = closing if closing and rnd.random() < 0.6 else [t for t in found if TEXTS[t].strip()] or found
    return rnd.choice(some)


def schemas(seed: int) -> Iterator[tuple[dict[str, Any], SamplingParams]]:
    """Random schemas that are served."""
    rnd = random.Random(seed)
    while True:
        schema = random_schema(rnd)
        try:
            yield schema, params_of({"json_schema": schema})
        except InvalidFieldError:
            continue


@pytest.mark.parametrize("seed", range(3))
def test_every_output_of_a_random_schema_validates(seed: int) -> None:
    """The validator is jsonschema, with formats; a walk is an output of a model without knowledge."""
    found, finished = schemas(seed), 0
    for number in range(20):
        schema, params = next(found)
        rnd = random.Random(f"{seed} {number}")
        for _ in range(2):
            output, end = walk(rnd, params)
            if end is not None:
                assert end == COMPLETE
                jsonschema.Draft202012Validator(schema).validate(json.loads(text_of(output)))
                finished += 1
    assert finished > 20


def test_masks_equal_byte_grammar() -> None:
    """Against the grammar itself, in single bytes: a token is allowed iff its bytes are."""
    params = params_of({"regex": "(ab|a cat|the .{1,9}|[^a-z]+)"})
    byte = grammars_to_check(TOKENIZER, EOS)
    for output in ([], [TOKENIZER.encode("a")[0]], TOKENIZER.encode("the b")):
        found = allowed(new_masks(), output, params)
        for token, text in enumerate(TEXTS):
            matcher = byte.begin(params.grammar).result().deep_copy()
            before = [value for known in output for value in TEXTS[known]]
            ids = [_byte_id(value) for value in (*before, *text)]
            takes = bool(text) and token not in TOKENIZER.added_tokens and matcher.try_consume_tokens(ids) == len(ids)
            assert (token in found) == takes or token == END


def _byte_id(value: int) -> int:
    """Id of a byte in the vocabulary that checks grammars: all bytes fit before the special tokens."""
    return value


CHOICES = {"choices": ["yes", "yes please", "no"]}


def test_end_is_allowed_at_grammar_end() -> None:
    params, yes = params_of(CHOICES), TOKENIZER.encode_inside("yes")
    assert END not in allowed(new_masks(), [], params)
    assert END in allowed(new_masks(), yes, params)
    assert allowed(new_masks(), TOKENIZER.encode_inside("no"), params) == COMPLETE
    ignoring = params_of(CHOICES, ignore_eos=True)
    found = allowed(new_masks(), yes, ignoring)
    assert END not in found
    assert found
    assert allowed(new_masks(), [], params_of({"regex": ""}, ignore_eos=True)) == COMPLETE


def test_other_masks_narrow_grammar_mask() -> None:
    yes, no = TOKENIZER.encode_inside("yes"), TOKENIZER.encode_inside("no")
    long = params_of(CHOICES, min_tokens=20)
    assert END not in allowed(new_masks(), yes, long)
    assert END in allowed(new_masks(), yes, params_of(CHOICES, min_tokens=len(yes)))
    # Nothing but an end is left: the grammar wins.
    assert allowed(new_masks(), TOKENIZER.encode_inside("yes please"), long) == COMPLETE
    assert allowed(new_masks(), [], params_of({"regex": ""}, min_tokens=2)) in (COMPLETE, [END])
    only = params_of(CHOICES, allowed_token_ids=(no[0],))
    assert allowed(new_masks(), [], only) == [no[0]]
    without = params_of(CHOICES, bad_words_token_ids=((no[0],),))
    assert no[0] in allowed(new_masks(), [], params_of(CHOICES))
    assert no[0] not in allowed(new_masks(), [], without)
    nothing = params_of(CHOICES, allowed_token_ids=(no[0],), bad_words_token_ids=((no[0],),))
    assert "leave no token" in allowed(new_masks(), [], nothing)


def test_rows_without_grammar_are_not_masked() -> None:
    masks, params = new_masks(), params_of(CHOICES)
    plain = SamplingParams(allowed_token_ids=(5,), min_tokens=3, bad_words_token_ids=((7,),))
    histories = {0: history([], plain, 1), 2: history([], params, 2)}
    bits, ended = masks.confined(histories)
    assert bits is not None
    assert bits.rows.tolist() == [2]
    assert not ended
    others = LogitMasks(EOS)
    found = others.allowed(histories, SIZE), others.masked(histories, {}, lambda places: pytest.fail("late"), SIZE)
    assert [one is not None and set(one.rows.tolist()) for one in found] == [{0}, {0}]
    assert masks.confined({0: history([], plain, 1)}) == (None, {})


def test_grammar_state_follows_tokens() -> None:
    """More tokens, fewer (after an interrupted step), another list (the sequence returned), another grammar."""
    masks, params = new_masks(), params_of({"regex": "(ab)*c"})
    a, b, c = (TOKENIZER.encode_inside(letter)[0] for letter in "abc")
    output = [a]
    assert allowed(masks, output, params) == allowed(new_masks(), [a], params)
    output += [b, a, b]
    assert c in allowed(masks, output, params)
    del output[1:]
    assert c not in allowed(masks, output, params)
    assert allowed(masks, [c], params) == COMPLETE
    assert "cannot go on" in allowed(masks, [c, c], params)
    assert b in allowed(masks, [], params_of({"choices": ["b"]}), seq_id=2)


def test_late_token_advances_grammar() -> None:
    params, ab = params_of({"regex": "ab"}), TOKENIZER.encode_inside("a")
    masks = new_masks()
    bits, ended = masks.confined({0: history([], params).with_token(ab[0])})
    assert bits is not None
    assert not ended
    expected, _ = new_masks().confined({0: history(ab, params)})
    assert expected is not None
    assert np.array_equal(bits.bits, expected.bits)


def ahead(masks: GrammarMasks, output: list[int], params: SamplingParams, drafts: list[int]) -> list[int] | str:
    """The ids that a draft model may draw after `drafts`; or the reason why it may draw none."""
    bits, ended = masks.ahead({3: history(output, params).with_drafts(drafts)})
    assert bits is not None
    return ended[3] if ended else np.flatnonzero(np.unpackbits(bits.bits[0].view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("others", [{}, {"ignore_eos": True}, {"min_tokens": 30, "bad_words_token_ids": ((40, 41),)}])
def test_masks_ahead_equal_masks_at_the_drafts_positions(others: dict[str, Any]) -> None:
    """The mask after drafts equals the mask after the same output, and leaves the grammar state unchanged."""
    schema = {"type": "object", "properties": {"ab": {"type": "string"}}, "required": ["ab"]}
    params = params_of({"json_schema": schema}, **others)
    rnd, masks, output = random.Random(1), new_masks(), list[int]()
    while not isinstance(allowed(masks, output, params), str) and len(output) < 60:
        drafts = list[int]()
        for _ in range(4):
            found, expected = ahead(masks, output, params, drafts), allowed(new_masks(), [*output, *drafts], params)
            if isinstance(expected, str):
                assert found == COMPLETE
                break
            assert found == expected
            drafts.append(choose(rnd, expected))
            if drafts[-1] == END:
                break
        output.append(drafts[0])
        if output[-1] == END:
            break
    assert len(output) > 5


def test_slow_masks_do_not_confine_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has no time for several slow masks of a sequence. The row's other limits still apply."""
    letters = tuple(TEXTS.index(letter) for letter in (b"a", b"b", b"c"))
    params, output = params_of({"regex": "[ab]{4}"}, allowed_token_ids=letters), list[int]()
    masks, some = new_masks(), sorted([*letters, END])
    assert ahead(masks, output, params, []) == some, "nothing is known of the sequence"
    allowed(masks, output, params)
    assert ahead(masks, output, params, []) == sorted(letters[:2])
    monkeypatch.setattr(grammar_masks, "_SLOW_S", 0.0)
    assert ahead(masks, output, params, []) == some


def test_slices_of_the_vocabulary_change_no_mask() -> None:
    """Slices are a shortcut: the masks equal those without slices, along random walks and at each length of a text."""
    tokens = TOKENIZER.token_bytes()
    plain = Grammars(library.vocabulary([*tokens, *[b""] * (SIZE - len(tokens))], {*TOKENIZER.added_tokens}, EOS, []))
    texts = ({"type": "string", "maxLength": length} for length in (3, 9, 30))
    served = [params_of({"json_schema": one}) for one in texts] + [params for _, params in islice(schemas(5), 6)]
    for number, params in enumerate(served):
        sliced, whole = new_masks(), GrammarMasks(plain, LogitMasks(EOS), EOS)
        output, _ = walk(random.Random(number), params, 60)
        for count in range(len(output)):
            assert allowed(sliced, output[:count], params) == allowed(whole, output[:count], params)


def test_free_text_masks_stop_searching_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches also stop while the last choice is still allowed; they start again when a quote ends the text."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    given = {**schema, "required": ["name", "age"], "x-guidance": {"whitespace_flexible": False}}
    params, masks, output = params_of({"json_schema": given}), new_masks(), TOKENIZER.encode_inside('{"name":"')
    begin, found, searched, look = len(output), dict[int, list[int]](), list[int](), TextAhead.look

    def counted(self: TextAhead, *arguments: Any) -> None:
        searched.append(len(output))
        look(self, *arguments)

    monkeypatch.setattr(TextAhead, "look", counted)
    assert allowed(masks, output, params)
    text = [token for letter in "abcdefghij" for token in TOKENIZER.encode_inside(letter)]
    for token in [*text, *TOKENIZER.encode_inside("!"), *text[:3], *TOKENIZER.encode_inside('"')]:
        before = history(output, params)
        output.append(token)
        assert not masks.completes(before, [token])
        if run := masks.forced(before, [token]):
            found[len(output)] = run
        assert allowed(masks, output, params)
    assert searched == [begin + 1, begin + 15]
    assert list(found) == [begin + 15]
    assert b"".join(TEXTS[token] for token in found[begin + 15]) == b',"age":'


def test_few_idle_states_are_kept() -> None:
    masks, params = new_masks(), params_of(CHOICES)
    for seq_id in range(200):
        allowed(masks, [], params, seq_id)
    assert len(masks._states) <= 70


def test_grammar_is_compiled_once_and_errors_are_reported() -> None:
    compiled = model_grammars(TOKENIZER, SIZE, EOS)
    text = grammar_of(CHOICES)
    assert compiled.begin(text) is compiled.begin(text)
    one, other = (compiled.begin(text).result().deep_copy() for _ in range(2))
    one.consume_tokens(TOKENIZER.encode_inside("no"))
    assert one.is_stopped()
    assert not other.is_stopped()
    with pytest.raises(GrammarError, match="does not compile"):
        compiled.begin("start: foo").result()
    for number in range(200):
        compiled.begin(f'start: "{number}"')
    assert len(compiled._kept) <= 128
    masks = GrammarMasks(compiled, LogitMasks(EOS), EOS)
    assert "does not compile" in allowed(masks, [], SamplingParams(grammar="start: foo"))


def test_grammar_work_is_bounded_at_run_time() -> None:
    """A grammar that exceeds its bound at run time ends its sequence with a reason. Other sequences of the same grammar
    share its expressions and continue, each by its own tokens."""
    params = params_of({"regex": "(a|b|[ab]{2,5}|.{3,900}){1,900}"})
    masks, letter = new_masks(), TOKENIZER.encode_inside("a")
    first = letter * 50
    before = allowed(masks, first, params, seq_id=1)
    assert isinstance(before, list)
    end = allowed(masks, letter * 100, params, seq_id=2)
    assert isinstance(end, str)
    assert "the constraint cannot go on: lexer error" in end
    first += letter
    assert allowed(masks, first, params, seq_id=1) == allowed(new_masks(), first, params)
    assert allowed(masks, letter * 50, params, seq_id=3) == before
    assert allowed(masks, letter * 100, params, seq_id=4) == end
