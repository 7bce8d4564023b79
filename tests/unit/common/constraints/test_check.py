"""Constraints become grammars or are refused with the place of the fault; hostile ones do no harm."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from common.constraints import check as check_module
from common.constraints import library
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from common.limits import MAX_CHOICES, MAX_GRAMMAR_BYTES
from tests.covering import slow_but

TOOL, END = 300, 301
SPECIAL = {TOOL: "<|tool|>", END: "<|end|>"}
CHECKER = GrammarChecker(SPECIAL, {END})
VOCAB = library.byte_vocabulary(SPECIAL, {END})


def check(given: Any, *, optional_space: bool = False) -> str:
    return CHECKER.check(Constraint.of(given), optional_space=optional_space)


def takes(grammar: str, text: str, *before: int) -> bool:
    """True if the grammar accepts `text` after the special tokens `before`."""
    matcher = library.compiled(grammar, VOCAB, library.RUNNING)
    ids = [*before, *text.encode()]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "good", "bad"),
    [
        ({"json_object": True}, '{"a": [1]}', "[1]"),
        ({"json_schema": {"type": "integer"}}, "12", '"a"'),
        ({"json_schema": True}, "null", "nul"),
        ({"regex": r"\d{2}/[a-z]+"}, "12/ab", "12ab"),
        ({"regex": "//x|#y"}, "#y", "x"),
        ({"regex": "a\n|b"}, "a\n", "a"),
        ({"regex": ""}, "", "a"),
        ({"choices": ["yes", "no"]}, "no", "maybe"),
        ({"choices": ['"\\\n\x00\x7f', "ü😀\u2028"]}, '"\\\n\x00\x7f', "u"),
        ({"grammar": 'start: "a" b+\nb: /[0-9]/'}, "a12", "a"),
        ({"grammar": 'root ::= "a" b+\nb ::= [0-9]'}, "a12", "a"),
        ({"grammar": 'start: "x" %json {"enum": ["}"]} "::"'}, 'x"}"::', 'x"{"::'),
        ({"grammar": '# " %json\nstart: "#" // "\n'}, "#", "# "),
    ],
)
def test_forms(given: Any, good: str, bad: str) -> None:
    grammar = check(given)
    assert takes(grammar, good)
    assert not takes(grammar, bad)
    spaced = check(given, optional_space=True)
    assert takes(spaced, good)
    assert takes(spaced, f" {good}")
    assert not takes(spaced, bad)
    assert not takes(grammar, f" {good}")


@pytest.mark.parametrize("given", [{"choices": ["a", " ab"]}, {"regex": "a| ab"}])
def test_optional_space_hides_no_text(given: Any) -> None:
    grammar = check(given, optional_space=True)
    for text in ("a", " a", " ab", "  ab"):
        assert takes(grammar, text), text
    assert not takes(grammar, "ab")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('start: "x" start', "line 1, column 1: no text satisfies rule 'start'"),
        ('start: "a" | "b" x\nx: "c" x', "line 2, column 1: no text satisfies rule 'x'"),
        ('start: a?\na: "x" a', "line 2, column 1: no text satisfies rule 'a'"),
        ('start: (a | "y" b)+\na: "x" "y"\nb: ("z" | "w") b ~ 1..2', "line 3, column 1: no text satisfies rule 'b'"),
        ('start: a\n  | b\n\n// c\n  | "c"\na: a{2} "x"\nb: "b"', "line 6, column 1: no text satisfies rule 'a'"),
        ('start: a\na: %json {"const": "b: b"} a', "line 1, column 1: no text satisfies rule 'start'"),
        ('start: "x" (start | "y")', ""),
        ('start: "x" start? | start* start{0,3} start ~ 0..2 "z" [start]', ""),
        ('start: a\na[lazy]: T // a: a\nT: /b: b/ | "c: c"\n  | "d"', ""),
        ('start: %lark {\nstart: "}" y\ny: "a" "z"\n} "b"', ""),
        ('%ignore / +/\nstart: ( "a" | [ "b" ] ) -> first\n | "c"', ""),
        ('start: perm::0x0\nperm::_: "" %if is_ones([0:2])\n | "a" perm::set_bit(0) %if bit_clear(0)', ""),
    ],
)
def test_lark_rule_without_end_refused(text: str, rule: str) -> None:
    if rule:
        with pytest.raises(InvalidFieldError, match=re.escape(rule)):
            check({"grammar": text})
    else:
        check({"grammar": text})


def test_unknown_special_token_of_model_without_any_refused_by_name() -> None:
    """The library refused such a grammar with the text of a panic."""
    checker = GrammarChecker({}, {5})
    for text in ("start: <|unknown|>", "root ::= <|unknown|>"):
        with pytest.raises(InvalidFieldError, match=r"line 1, column \d+: unknown special token '<\|unknown\|>'"):
            checker.check(Constraint("grammar", (text,)), optional_space=False)


def test_special_tokens_are_named_and_never_spelled() -> None:
    grammar = check({"grammar": 'start: <|tool|> "x" | /.*/'})
    assert takes(grammar, "x", TOOL)
    assert takes(grammar, "<|tool|>x")
    assert not takes(check({"grammar": 'start: "<|tool|>"'}), "", TOOL)
    assert takes(check({"grammar": f'start: <[{TOOL}]> "x"'}), "x", TOOL)


@pytest.mark.parametrize(
    ("given", "path", "said"),
    [
        ({"regex": "ab(c"}, "regex", "character 3: unclosed group"),
        ({"regex": r"(a)\1"}, "regex", "character 4: backreferences are not supported"),
        ({"regex": "a(?=b)"}, "regex", "character 2: look-around"),
        ({"grammar": 'start: "a'}, "grammar", "line 1, column 10: lexer error"),
        ({"grammar": 'start: foo\nfoo: "x" bar'}, "grammar", 'line 2, column 6: unknown name: "bar"'),
        ({"grammar": "start: <|none|>"}, "grammar", "line 1, column 8: unknown special token '<|none|>'"),
        ({"grammar": 'start: "x"\nfoo[temperature=1]: /a/'}, "grammar", "line 2, column 5: 'temperature'"),
        ({"grammar": 'start: a\na[capture="x"]: /a/'}, "grammar", "line 2, column 3: 'capture'"),
        ({"grammar": '%llguidance {}\nstart: "x"'}, "grammar", "line 1, column 1: '%llguidance'"),
        ({"grammar": 'start: "x"\n  %json {"not": {}}'}, "grammar", "line 2, column 9: of its schema, at its root"),
        ({"grammar": 'start: "x" %json {"a": '}, "grammar", "line 1, column 18: the schema is not valid JSON"),
        ({"grammar": "start: a\na: a"}, "grammar", "line 1, column 1: no text satisfies rule 'start': it never ends"),
        ({"grammar": "start: <|unknown|>"}, "grammar", "line 1, column 8: unknown special token '<|unknown|>'"),
        ({"grammar": "root ::= foo"}, "grammar", "line 1, column 10: there is no rule 'foo'"),
        ({"grammar": 'root ::= "a'}, "grammar", "line 1"),
        ({"grammar": 'root := "a" # ::='}, "grammar", "line 1"),
        ({"choices": []}, "choices.texts", "has 0 entries"),
        ({"choices": ["x"] * (MAX_CHOICES + 1)}, "choices.texts", f"1 to {MAX_CHOICES}"),
        ({"choices": "yes"}, "choices", "a list of texts"),
        ({"choices": [1]}, "choices", "text"),
        ({"choices": ["\ud83d"]}, "choices", "half of a surrogate pair"),
        ({"regex": "x" * (MAX_GRAMMAR_BYTES + 1)}, "regex", f"at most {MAX_GRAMMAR_BYTES} bytes"),
        ({"regex": "\n" * (MAX_GRAMMAR_BYTES // 2 + 100)}, "regex", "becomes a grammar of"),
        ({"json_object": False}, "json_object", "true"),
        ({"json_schema": {"const": object()}}, "json_schema", "not valid JSON"),
    ],
)
def test_faults(given: Any, path: str, said: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        check(given)
    (violation,) = refused.value.violations
    assert violation.path == f"sampling_params.constraint.{path}"
    assert said in str(violation)
    # An optional blank before the answer does not shift the place of the fault.
    with pytest.raises(InvalidFieldError) as spaced:
        check(given, optional_space=True)
    assert str(spaced.value) == str(refused.value)


@pytest.mark.parametrize("given", [None, "a+", {}, {"regex": "a", "choices": ["b"]}, {"other": "x"}])
def test_invalid_constraint_form_is_refused(given: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"sampling_params\.constraint"):
        Constraint.of(given)


def test_constraint_is_checked_once() -> None:
    checker = GrammarChecker(SPECIAL, {END})
    good, bad = Constraint("regex", ("a+",)), Constraint("regex", ("(",))
    assert checker.known(good, optional_space=False) is None
    grammar = checker.check(good, optional_space=False)
    assert checker.known(good, optional_space=False) == grammar
    # A different constraint, although its joined texts are equal.
    assert checker.known(Constraint("choices", ("a+",)), optional_space=False) is None
    assert checker.known(good, optional_space=True) is None
    with pytest.raises(InvalidFieldError) as first:
        checker.check(bad, optional_space=False)
    with pytest.raises(InvalidFieldError) as again:
        checker.known(bad, optional_space=False)
    assert str(first.value) == str(again.value)
    assert first.value is not again.value


def test_checked_constraint_is_known_to_the_same_salt_alone() -> None:
    checker, good = GrammarChecker(SPECIAL, {END}), Constraint("regex", ("a+",))
    grammar = checker.check(good, optional_space=False, salt=b"alice")
    assert checker.known(good, optional_space=False, salt=b"bob") is None
    assert checker.known(good, optional_space=False) is None
    assert checker.known(good, optional_space=False, salt=b"alice") == grammar


def test_checked_constraints_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few large constraints are kept, and the bytes of refused ones count too."""
    monkeypatch.setattr(check_module, "MAX_CHECKED_GRAMMAR_BYTES", 1 << 20)
    checker, kept = GrammarChecker(SPECIAL, {END}), list[Constraint]()
    for number in range(60):
        kept.append(Constraint("regex", (f"{number}" + "x" * 50_000,) if number % 3 else (f"({number}",)))
        with contextlib.suppress(InvalidFieldError):
            checker.check(kept[-1], optional_space=False)
        assert checker.num_bytes <= 1 << 20
    assert checker.known(kept[-1], optional_space=False)
    assert checker.known(kept[1], optional_space=False) is None
    assert 15 <= len(checker._known) <= 35


def chain(rule: Callable[[int], str], first: str, last: str) -> str:
    """As many chained rules as fit, each of which refers to the next."""
    text, number = first, 0
    while len(text) + len(rule(number)) + 40 < MAX_GRAMMAR_BYTES:
        text += rule(number)
        number += 1
    return text + last.format(number)


def references(number: int) -> dict[str, Any]:
    return {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(number)} | {f"a{number}": {"type": "integer"}}


HOSTILE: dict[str, Any] = {
    "aliases": {"grammar": chain(lambda i: f"r{i}:r{i + 1}\n", "start:r0\n", 'r{}:"x"')},
    "terminals": {"grammar": chain(lambda i: f"T{i}:T{i + 1}\n", "start:T0\n", 'T{}:"x"')},
    "references": {"json_schema": {"$ref": "#/$defs/a0", "$defs": references(1600)}},
    "all of references": {"json_schema": {"allOf": [{"$ref": "#/$defs/a0"}], "$defs": references(1600)}},
    "brackets": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "brackets of GBNF": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "aliases of GBNF": {"grammar": chain(lambda i: f"r{i}::=r{i + 1}\n", "root::=r0\n", 'r{}::="x"')},
    "literal of GBNF": {"grammar": f'root ::= ("(" root ")" | "{"ab" * 31_000}")*'},
    "stars of GBNF": {"grammar": f'root ::= ("(" root ")" | {"[a-z]* " * 9_000})*'},
    "words of GBNF": {
        "grammar": 'root ::= "z" | "(" root ")" ' + " ".join(f'| "w{i * 7919 % 65537}" root' for i in range(2800))
    },
    "repeated repetitions of GBNF": {"grammar": f'root ::= ("(" root ")" | {"(" * 30}[a-z]{"{1,999})" * 30})*'},
    "groups": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "power of sets": {"json_schema": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(20)]}},
    "repetitions": {"regex": "((((a{1,999}){1,999}){1,999}){1,999}){1,999}"},
    "letters": {"regex": r"\p{L}{1,50000}(\p{L}|\p{N}){1,50000}"},
    "words": {"regex": "|".join(f"w{i}x{i * 7919 % 65537}" for i in range(4600))},
    "enum": {"json_schema": {"enum": [f"{i * 7919 % 65537}" for i in range(7000)]}},
    "recursion": {"grammar": 'start: a\na: a a a | "x" | ""'},
    "ambiguity": {"grammar": 'start: (/.*/ | /[a-z]*/ | /a?/ | "a" | "")*'},
    "loop": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
    "nested": {"json_schema": '{"items":' * 6000 + "{}" + "}" * 6000},
    "long string": {"json_schema": {"type": "string", "minLength": 2**31, "pattern": "^(ab|cd)*$"}},
    # Accepted, although they force long texts, have slow masks, or become large.
    "forced letters": {"regex": "a{100000}"},
    "forced chain": {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "7a"\n'
    },
    "forced text": {"grammar": f'start: "{"abcdefghij" * 6000}"'},
    "counted blanks": {"regex": "(.{0,50}a){1,400}"},
    "counted groups": {"regex": "(a|b|[ab]{2,5}|.{3,900}){1,900}"},
}
PROGRAM = """
import json, sys
from pathlib import Path
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
def most_kb():
    # Not ru_maxrss: that of who started this process is its beginning.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
checker = GrammarChecker({}, {256})
before = most_kb()
try:
    checker.check(Constraint.of(json.load(sys.stdin)), optional_space=False)
    said = "taken"
except InvalidFieldError as error:
    said = str(error)[:200]
print(json.dumps([said, (most_kb() - before) >> 10]))
"""


@pytest.mark.parametrize(
    "name", slow_but({"enum", "recursion", "ambiguity", "loop", "nested", "long string"}, sorted(HOSTILE))
)
def test_hostile_input_is_taken_or_refused(name: str) -> None:
    """In a separate process, which must neither crash nor use much memory; its main thread has the usual stack."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(HOSTILE[name]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    said, megabytes = json.loads(done.stdout)
    assert said == "taken" or "sampling_params.constraint" in said
    assert megabytes < 700
