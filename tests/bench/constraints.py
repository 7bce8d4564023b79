"""What constraints cost: `python -m tests.bench.constraints [--folder FOLDER] [--in-flight 1 8 32] [--rounds 8]`.

Random weights of Qwen3-0.6B's shape, and a vocabulary of as many tokens as it has, trained on the sources of the
interpreter and its packages. Engines of one model take turns: the same number of answers, all of the same length,
without a constraint, all with a schema, all with any JSON object, every second one with either, and a single one. Look
at the ratios of neighbours; CPU time is of all threads. Garbage is collected as a worker does it, between turns: the
interpreter's own collections of everything take 0.1 s each, and fall on whoever allocates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.config import Config
from tests.bench.decode_step import SHAPES
from tests.checkpoints import SPECIAL_TOKENS, make_checkpoint
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig
from worker.garbage import GarbageCollector
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

PROMPT: Final = [5, 6, 7, 8]


def _schema(**of_texts: Any) -> dict[str, Any]:
    """A schema that no answer is done with before its last token."""
    text = {"type": "string", **of_texts}
    person = {
        "type": "object",
        "properties": {
            "name": text,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["red", "green", "blue"]},
            "tags": {"type": "array", "items": text, "maxItems": 3},
            "score": {"type": "number"},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    return {"constraint": {"json_schema": {"type": "array", "minItems": 1000, "items": person}}}


# As llama.cpp's own grammar of JSON, with more rows than an answer has room for.
_GBNF: Final = r"""
root ::= "[" ws person ("," ws person){999,} "]"
person ::= "{" ws "\"name\"" ws ":" ws string "," ws "\"data\"" ws ":" ws value "}" ws
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


NONE: Final = "none"
_ANY: Final[dict[str, Any]] = {"constraint": {"json_object": True}}
WAYS: Final[dict[str, list[dict[str, Any]]]] = {
    NONE: [{}],
    "JSON Schema": [_schema()],
    "the same, texts of at most 40 characters": [_schema(maxLength=40)],
    "any JSON object": [_ANY],
    "JSON by a grammar in GBNF": [{"constraint": {"grammar": _GBNF}}],
    "every second answer the schema, others none": [{}, _schema()],
    # Drafts end these answers before the others, which then go on in smaller steps.
    "every second answer the schema without drafts, others none": [{}, {**_schema(), "num_drafts": 0}],
    "every second answer any JSON object, others none": [{}, _ANY],
    "one of 32 answers any JSON object, others none": [_ANY, *[{}] * 31],
}
_LONGEST: Final = 128
# Texts that tokens are learnt from.
_MOST_BYTES: Final = 40 << 20


def write_tokenizer(folder: Path, size: int) -> None:
    """Saves a byte-level BPE tokenizer of `size` tokens, trained on sources."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_sources(), trainer)
    if made.get_vocab_size() != size:
        raise SystemExit(f"the sources give {made.get_vocab_size()} tokens instead of {size}")
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL_TOKENS[2]}))


def _sources() -> Iterator[str]:
    left = _MOST_BYTES
    for root in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[root]).rglob("*.py")):
            text = path.read_text(errors="replace")
            yield text
            left -= len(text)
            if left < 0:
                return


class Way:
    """One engine's turns, in tokens per second of the clock and of CPU time.

    Attributes:
        constrained: part of the answers.

    Args:
        engine: of its own.
        asked: parameters of the answers, over and over.
        in_flight: answers at a time.
        tokens: of each.
        temperature: of all.
    """

    def __init__(
        self, engine: LLMEngine, asked: Sequence[dict[str, Any]], in_flight: int, tokens: int, temperature: float
    ) -> None:
        self.engine = engine
        self.constrained = sum("constraint" in asked[i % len(asked)] for i in range(in_flight)) / in_flight
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._tokens = tokens
        same = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True}
        self._params = [{**same, **asked[i % len(asked)], "seed": i} for i in range(in_flight)]
        # Some answers of random weights are soon done with any JSON object: others take their places.
        while short := [i for i, length in enumerate(self._lengths()) if length < tokens]:
            for i in short:
                self._params[i]["seed"] += in_flight

    def _lengths(self) -> list[int]:
        answers = self.engine.generate([PROMPT] * len(self._params), self._params)
        return [len(answer["token_ids"]) for answer in answers]

    def turn(self) -> None:
        """Generates all answers at once."""
        wall, cpu = time.perf_counter(), time.process_time()
        count = sum(self._lengths())
        self.wall.append(count / (time.perf_counter() - wall))
        self.cpu.append(count / (time.process_time() - cpu))
        if count != len(self._params) * self._tokens:
            raise SystemExit("an answer has ended before its last token")


def measure(ways: dict[str, Way], rounds: int, what: str) -> list[dict[str, Any]]:
    """Rows of figures: tokens per second, the change that each way is of the first, by neighbours, with its standard
    error, and the CPU time that is added to each constrained token."""
    collector = GarbageCollector()
    collector.start()
    for _ in range(rounds):
        for way in ways.values():
            way.turn()
            collector.between_steps()
    collector.stop()
    first = next(iter(ways.values()))
    rows = []
    for name, way in ways.items():
        figures: list[tuple[str, str, float]] = [("rate", "tokens/s", statistics.median(way.wall))]
        for clock in ("wall", "cpu"):
            pairs = list(zip(getattr(way, clock), getattr(first, clock), strict=True))
            fewer = [100 * (1 - own / plain) for own, plain in pairs]
            figures += [(f"fewer_{clock}", "%", statistics.median(fewer)), (f"error_{clock}", "%", _error(fewer))]
        if way.constrained:
            added = [(1e6 / own - 1e6 / plain) / way.constrained for own, plain in zip(way.cpu, first.cpu, strict=True)]
            figures += [("added", "us", statistics.median(added)), ("error_added", "us", _error(added))]
        print(
            f"{what}, constraint {name}:",
            ", ".join(f"{metric} {v:.2f} {unit}" for metric, unit, v in figures),
            flush=True,
        )
        for metric, unit, value in figures:
            labels = {"in_flight": what, "constraint": name}
            rows.append({**labels, "metric": metric, "unit": unit, "value": round(value, 1 if unit != "%" else 2)})
    return rows


def _error(values: Sequence[float]) -> float:
    """The standard error of the median, by quartiles, which single turns that were disturbed do not move."""
    if len(values) < 4:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return float(1.2533 * (high - low) / 1.349 / math.sqrt(len(values)))


def prepare(folder: Path, shape: dict[str, Any]) -> None:
    """Creates the checkpoint if it is missing."""
    if (folder / "tokenizer.json").is_file():
        return
    make_checkpoint(folder, dtype="bfloat16", tokenizer=False, **shape)
    write_tokenizer(folder, shape["vocab_size"])


def main() -> None:
    """Prints a line for each number in flight and way, and writes figures as JSON to an optional file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the checkpoint, which is made where it is not there")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="beside none")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--prepare", action="store_true", help="only make the checkpoint")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    if options.layers is not None:
        shape = shape | {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory(prefix="constraints-") as made:
        folder = options.folder or Path(made)
        prepare(folder, shape)
        if not options.prepare:
            rows = run(folder, options)
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")


def make_runner(folder: Path, in_flight: int) -> tuple[Config, ModelRunner]:
    """A config and a runner for `in_flight` answers at a time."""
    blocks = in_flight * -(-_LONGEST // 16)
    config = Config(
        model=str(folder), dtype="bfloat16", kernels="cpu", max_model_len=_LONGEST, num_kvcache_blocks=blocks,
        # The engines share a pool: blocks cached by one are overwritten by the others.
        enable_prefix_caching=False,
    )  # fmt: skip
    model_config = ModelConfig.from_folder(folder)
    config = with_special_tokens(config, model_config)
    runner = ModelRunner(config, model_config)
    runner.allocate_kv_cache(blocks)
    return config, runner


def run(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways at all numbers in flight."""
    config, runner = make_runner(folder, max(options.in_flight))
    rows = []
    for in_flight in options.in_flight:
        ways = {
            name: Way(LLMEngine(config, runner=runner), asked, in_flight, options.tokens, options.temperature)
            for name, asked in WAYS.items()
            if len(asked) <= in_flight and (name == NONE or name in options.ways)
        }
        rows += measure(ways, options.rounds, str(in_flight))
    return rows


if __name__ == "__main__":
    main()
