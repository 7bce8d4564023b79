"""GBNF means the same as in llama.cpp: any parse counts, and no rule claims the longest text."""

from __future__ import annotations

import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from common.constraints import library
from common.constraints.check import GrammarChecker
from common.constraints.forms import Constraint
from common.errors import InvalidFieldError
from common.text.tokenizer import Tokenizer
from tests.covering import slow_but
from tests.gbnf import Reference, mutated, random_grammar
from worker.grammars import model_grammars

DEMO = Path(__file__).parents[4] / "deploy" / "demo" / "checkpoint"
CACHE = Path(__file__).parents[4] / "build" / "llama-cpp-python"
# Its source distributions contain llama.cpp's grammars. An old one is small, and has the most copied grammars.
PACKAGE = "llama-cpp-python"
VERSIONS = ("0.2.11", "0.3.16")
THINK, END = 300, 301
SPECIAL = {THINK: "<think>", END: "<|end|>"}
CHECKER = GrammarChecker(SPECIAL, {END})
VOCAB = library.byte_vocabulary(SPECIAL, {END})

# Grammars in common styles: rules that end with blanks, names before keywords, comments.
ARITHMETIC = r"""
root ::= (sum "=" blank factor "\n")+
sum ::= factor ([-+*/] factor)*
factor ::= name | digits | "(" blank sum ")" blank
name ::= [a-z] [a-z0-9_]* blank
digits ::= [0-9]+ blank
blank ::= [ \t\n]*
"""
OLD_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") blank
object ::= "{" blank ( string ":" blank value ("," blank string ":" blank value)* )? "}" blank
array  ::= "[" blank ( value ("," blank value)* )? "]" blank
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" blank # with escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? blank
blank  ::= ([ \t\n] blank)?
"""
PROGRAM = r"""
root ::= (statement)*
statement ::= ( type name blank "=" blank term ";" ) | ( name blank "=" blank term ";" ) | ( "return" blank term ";" ) |
    ( "while" "(" term ")" "{" statement* "}" ) | note | block-note
type ::= "int" blank | "integer" blank
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
term ::= name | [0-9]+ | name "(" term? ")" | "(" blank term blank ")"
note ::= "//" [^\n]* "\n"
block-note ::= "/*" ( [^*] | ("*" [^/]) )* "*/"
blank ::= [ \t\n]+
"""
MARKED = r"""
root ::= content
content ::= ([^<{] | "\n"+ | element | block)*
element ::= "<" tag ">" content "</" tag ">"
block ::= "{" line+ "}"
line ::= [^{}]+ "\n" | block "\n"?
tag ::= [a-z]+
"""
FENCED = 'root ::= "```" code "```"\ncode ::= [^~]*'
GRAMMARS = {"arithmetic": ARITHMETIC, "JSON": OLD_JSON, "program": PROGRAM, "fenced": FENCED, "marked": MARKED}


def check(text: str, *, optional_space: bool = False) -> str:
    return CHECKER.check(Constraint("grammar", (text,)), optional_space=optional_space)


def judged(matcher: library.Matcher, text: str, *before: int) -> tuple[bool, bool]:
    """(whether a text of the grammar begins with `text`, whether the grammar accepts `text`)."""
    fresh, ids = matcher.deep_copy(), [*before, *text.encode()]
    taken = fresh.try_consume_tokens(ids) == len(ids)
    return taken, taken and fresh.is_accepting()


def takes(grammar: str, text: str, *before: int) -> bool:
    return judged(library.compiled(grammar, VOCAB, library.RUNNING), text, *before)[1]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # The text after a repetition may look like one more repetition.
        ('root ::= word "z"\nword ::= [a-z]+', ["az", "zz", "azbz"], ["z", "az1", "a"]),
        ("root ::= key \":\" key\nkey ::= [a-z:]+", ["a:b", ":::", "a::b"], ["a:", "ab"]),
        (FENCED, ["``````", "```a`b```", "````````"], ["```~```", "```a``"]),
        ('root ::= ("a" | "ab") ("c" | "bcd")', ["ac", "abc", "abcd", "abbcd"], ["ab", "abcbcd"]),
        ('root ::= x x\nx ::= "(" x ")" | [a-c]* "b"', ["bb", "abcb", "(b)b", "((b))bb"], ["b", "a", "(b)"]),
        # Operators of other dialects are characters.
        ("root ::= [^a&&b]+", ["c", "[", "-~"], ["a", "b", "&", "c&"]),
        (r"root ::= [a-z&&0]", ["q", "&", "0"], ["1"]),
        ("root ::= [+--]", ["+", ",", "-"], ["."]),
        (r"root ::= [a~~b[:alpha:]", ["~", "a", "[", ":", "l"], ["z", "]"]),
        ("root ::= [^^]", ["a", "$"], ["^"]),
        ("root ::= [a^]", ["^", "a"], ["b"]),
        ("root ::= [-a] [a-]", ["-a", "a-", "--"], ["bb"]),
        ("root ::= [$(){}*+?.|/#]", list("$(){}*+?.|/#"), ["a", "\\"]),
        (r'root ::= "/\"#" "/*" "\\d"', ['/"#/*\\d'], ["/1"]),
        (r"root ::= [\]\[\\\"]+", ['][\\"'], ["a"]),
        # Every spelling of a character.
        (r'root ::= "\U0001F600" [\u0041-\u0043] "\x41\u00e9é"', ["😀BAéé"], ["😀DAéé"]),
        (r'root ::= "\t\r\n\\\"\[\]"', ['\t\r\n\\"[]'], ["\t"]),
        (r"root ::= [\U00010000-\U0010FFFF]", ["😀", "\U0010ffff"], ["a", "\uffff"]),
        (r"root ::= [\u0000-\uFFFF]", ["a", "\uffff", "\x00"], ["😀"]),
        ('root ::= "a\nb"', ["a\nb"], ["a"]),
        # Any character, including a line end.
        ("root ::= . . .", ["a\n😀", "\r\n\x00", "\u2028\u0085."], ["ab", "abcd"]),
        ("root ::= [^a]", ["\n", "é"], ["a", ""]),
        ("root ::= [^z-a]", ["a", "\n"], [""]),
        # Repetition counts.
        ('root ::= "ab"{2} [0-9]{1,3}', ["abab1", "abab123"], ["ab1", "abab", "abab1234"]),
        ('root ::= ("a" | b){2,} "c"{0,1} "d"{ 0 }\nb ::= "b"', ["ab", "bbbc"], ["a", "abd", "abcc"]),
        ('root ::= "a"{0,0} "b"*+?', ["", "bb"], ["a"]),
        ('root ::= ("y"{\n2\n,3\n} )', ["yy"], ["y"]),
        # Names, and places where lines may end.
        ('root ::= start | a_b | a-b | 1\nstart ::= "s"\na_b ::= "u"\na-b ::= "m"\n1 ::= "1"', [*"sum1"], ["a_b"]),
        ('# 1\r\nroot ::= # 2\n "a" | # 3\n "b" ( "c"\n "d" # 4\n )?\r\n\r\n# 5', ["a", "b", "bcd"], ["bc"]),
        ('root ::=\n\n"a"', ["a"], [""]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= [] [^] | | x\nx ::= ( )", [""], ["a"]),
        # Recursion at the end, at the beginning, in the middle, and through other rules.
        ('root ::= "{" ws "}" ws\nws ::= ([ \\t\\n] ws)?', ["{}", "{ }\n ", "{\t\n}"], ["{", "}"]),
        ('root ::= "x" | [a-z] root', ["x", "xxax"], ["", "a"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["", "ab"]),
        ('root ::= "(" root ")" root | ""', ["", "(())()"], ["(", ")("]),
        ('root ::= a | "r"\na ::= b\nb ::= root "s" | "t"', ["r", "tss", "rs"], ["s"]),
        # One text in two spellings, which made the library's trees of literals panic.
        ('root ::= ("a" "bc" | a ("b" "c"){1} | "abc" | "è" "è" | "èè") "d"\na ::= "a" | "a"', ["abcd", "èèd"], ["a"]),
        # Repetitions of texts and of recursive rules.
        ('root ::= ([a-c] | "(" root ")")*', ["", "ab(c)a", "()(())"], ["(", "ab)"]),
        ('root ::= item+\nitem ::= word | "(" item* ")" | item "!"\nword ::= [a-z]+ | "-"', ["ab!", "-(a-())x!!"], []),
        # The grammar never enters alternatives without an end.
        ('root ::= "a" | "b" x | y\nx ::= "c" x\ny ::= [z-a] root', ["a"], ["b", "bc"]),
        ('root ::= "a" x?\nx ::= "c" x', ["a"], ["ac"]),
    ],
)  # fmt: skip
def test_gbnf_text_accepted_by_characters(grammar: str, good: list[str], bad: list[str]) -> None:
    made = check(grammar)
    reference = Reference(grammar) if "{\n" not in grammar else None
    for text, expected in [*((one, True) for one in good), *((one, False) for one in bad)]:
        assert takes(made, text) == expected, text
        assert reference is None or reference.accepts(text) == expected, text


def test_gbnf_optional_space_hides_no_text() -> None:
    """The optional blank before an answer is one more alternative, so texts that begin with a blank stay possible."""
    made = check('root ::= "a" | " ab" | " " root', optional_space=True)
    for text in ("a", " a", "  a", " ab", "  ab", "   ab"):
        assert takes(made, text), text
    assert not takes(made, "ab")


def test_gbnf_dead_ends_are_never_begun() -> None:
    matcher = library.compiled(check('root ::= "a" | "b" x\nx ::= "c" x'), VOCAB, library.RUNNING)
    assert judged(matcher, "a") == (True, True)
    assert judged(matcher, "b") == (False, False)


def test_gbnf_special_tokens() -> None:
    made = check(f"root ::= <think> [^x]* <[{THINK}]>")
    matcher = library.compiled(made, VOCAB, library.RUNNING)
    assert matcher.try_consume_tokens([THINK, *b"ab<think>", THINK]) == 11
    assert matcher.is_accepting()
    assert not takes(made, "<think>")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a" foo\n', "line 1, column 14: there is no rule 'foo'"),
        ('rot ::= "a"', "there is no rule 'root'"),
        ("::= x", "line 1, column 1: expected the name of a rule"),
        ('root ::= "a" )', "line 1, column 14: unexpected ')'"),
        ('root ::= "a\\q"', "line 1, column 12: unknown escape '\\\\q'"),
        ('root ::= "a" \n\n  | "b"', "line 3, column 3: expected the name of a rule"),
        ('root ::= ("a" | "b"', "line 1, column 10: the bracket is not closed"),
        ('root ::=\n "a', "line 2, column 2: it is not closed"),
        ("root ::= [a-", "line 1, column 10: it is not closed"),
        (r'root ::= "\x4"', "line 1, column 11: unknown escape '\\\\x'"),
        (r'root ::= "\uD83D\uDE00"', "line 1, column 11: this number is no character"),
        (r'root ::= "\U00110000"', "line 1, column 11: this number is no character"),
        ('root ::= * "a"', "line 1, column 10: there is nothing to repeat"),
        ('root ::= ""*', "line 1, column 12: there is nothing to repeat"),
        ('root ::= "a"{3,2}', "line 1, column 13: 3 to 2 times is no number of times"),
        ('root ::= "a"{,2}', "line 1, column 14: expected a number"),
        ('root ::= "a"{2', "line 1, column 15: expected '}'"),
        ('root ::= "a"{9999999}', "line 1, column 14: at most 1000000 times are served"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: rule 'root' is defined twice"),
        ("root ::= !<think>", "line 1, column 10: '!' is not supported"),
        ("root ::= <other>", "line 1, column 10: unknown special token '<other>'"),
        ("root ::= <think", "line 1, column 10: expected a token as <name>"),
        ("root ::= <[999999]>", "999999"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "it is nested too deeply"),
        ('root ::= "a"' + "*" * 400, "it is nested too deeply"),
        ('root ::= "a"\x00', "line 1, column 13: unexpected '\\x00'"),
        ('\ufeffroot ::= "a"', "line 1, column 1: expected the name of a rule"),
        # No text satisfies these.
        ("root ::= root", "no text satisfies it"),
        ('root ::= "a" root', "no text satisfies it"),
        ('root ::= "a" x\nx ::= "b" y\ny ::= "c" x | x', "no text satisfies it"),
        ("root ::= [z-a]", "no text satisfies it"),
        (r"root ::= [\uD800-\uDFFF]", "no text satisfies it"),
        (r"root ::= [^\U00000000-\U0010FFFF]", "no text satisfies it"),
    ],
)
def test_gbnf_fault_refused_by_name_and_place(grammar: str, said: str) -> None:
    for optional_space in (False, True):
        with pytest.raises(InvalidFieldError) as refused:
            check(grammar, optional_space=optional_space)
        (violation,) = refused.value.violations
        assert violation.path == "sampling_params.constraint.grammar"
        assert said in violation.problem


@pytest.mark.parametrize("seed", slow_but(set(range(40)), list(range(400))))
def test_random_gbnf_judged_as_by_reference(seed: int) -> None:
    rng = random.Random(seed)
    grammar = random_grammar(rng)
    reference = Reference(grammar)
    if not reference.has_text:
        with pytest.raises(InvalidFieldError, match="no text satisfies it"):
            check(grammar)
        return
    matcher = library.compiled(check(grammar), VOCAB, library.RUNNING)
    texts = {"", "a", "ab", "ba", "é"}
    for _ in range(12):
        texts.add(text := reference.sample(rng, 12)[:40])
        texts |= {mutated(text, rng, "abcé") for _ in range(3)}
    for text in texts:
        assert judged(matcher, text) == (reference.begins(text), reference.accepts(text)), (grammar, text)


@pytest.mark.parametrize("name", GRAMMARS)
def test_written_gbnf_judged_as_by_reference(name: str) -> None:
    judge(GRAMMARS[name], random.Random(name), texts=25)


def judge(grammar: str, rng: random.Random, texts: int) -> None:
    """Compares matcher and reference on texts of a grammar and on mutations of these."""
    reference = Reference(grammar)
    matcher = library.compiled(check(grammar), VOCAB, library.RUNNING)
    for _ in range(texts):
        text = reference.sample(rng, 40)[:150]
        for one in (text, *(mutated(text, rng, 'a1 \n"{}[],:=(+*/é') for _ in range(4))):
            assert judged(matcher, one) == (reference.begins(one), reference.accepts(one)), one


@pytest.mark.parametrize("name", GRAMMARS)
def test_gbnf_masks_allow_exactly_valid_continuations(name: str) -> None:
    """A worker's mask allows a token if and only if a text of the grammar continues with it."""
    tokenizer, rng = Tokenizer.from_folder(DEMO), random.Random(name)
    grammars = model_grammars(tokenizer, 1024, frozenset({1023}))
    texts = tokenizer.token_bytes()
    reference = Reference(GRAMMARS[name])
    compiled = grammars.begin(check(GRAMMARS[name])).result()
    for _ in range(3):
        matcher, made = compiled.deep_copy(), ""
        for token in tokenizer.encode(reference.sample(rng, 25)[:60]):
            mask = matcher.compute_bitmask()
            for other in {token, *rng.sample(range(len(texts)), 40)} - set(tokenizer.added_tokens):
                if (text := whole(texts[other])) is not None:
                    assert bool(mask[other // 8] >> other % 8 & 1) == reference.begins(made + text), (made, text)
            assert bool(mask[1023 // 8] >> 1023 % 8 & 1) == reference.accepts(made)
            if (text := whole(texts[token])) is None:
                break
            assert matcher.consume_token(token)
            made += text


def whole(data: bytes) -> str | None:
    """The text of a token, if it consists of whole characters."""
    try:
        return data.decode() or None
    except UnicodeDecodeError:
        return None


@pytest.fixture(scope="module")
def published() -> dict[str, str]:
    """Grammars that llama.cpp publishes, by version and name."""
    for version in VERSIONS:
        folder = CACHE / version
        if not list(folder.glob("*.tar.gz")):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            done = subprocess.run(
                [*pip, "--dest", str(folder), f"{PACKAGE}=={version}"],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                pytest.skip("the package registry is not reachable")
    found = {}
    for version in VERSIONS:
        (archive,) = (CACHE / version).glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                if member.name.endswith(".gbnf") and (file := files.extractfile(member)) is not None:
                    found[f"{version} {Path(member.name).name}"] = file.read().decode()
    return found


@pytest.mark.slow
def test_published_gbnf_judged_as_by_reference(published: dict[str, Any]) -> None:
    assert {"arithmetic.gbnf", "json.gbnf", "c.gbnf", "list.gbnf"} <= {name.split()[1] for name in published}
    for name, grammar in published.items():
        judge(grammar, random.Random(name), texts=60)
