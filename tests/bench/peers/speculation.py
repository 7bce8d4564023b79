"""Speculation beside llama.cpp's: `python -m tests.bench.peers.speculation --folder FOLDER`.

One request at a time, greedy, decoded by each engine plainly, with lookup and with a draft model, in turns; tokens per
second from the first token on. Weights are random, so what drafts are worth is made: attention adds nothing to what the
model says, though it is computed, so that a token hangs on the one before alone; and layers behind the draft model's,
which are the target's first ones, add little. `copy`: a prompt has an answer to itself, and then begins it again.
`copy, 20% other tokens`: so much of that answer (--other) was replaced, which sets the share of drafts that are right.
`free`: random tokens. How many drafts were right is counted by each engine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from safetensors.torch import load_file, save_file

from common.config import Config, SpeculativeConfig
from common.params.config_parts import DRAFT_MODEL, NGRAM, QUANTIZE, QUANTIZE_NO
from tests.bench.peers.checkpoint import SHAPES, make
from tests.bench.peers.client import HOST
from tests.bench.peers.folder import PeerFolder, add_folder_option, need
from tests.bench.peers.peers import http_serves
from tests.e2e.service import free_port
from worker.llm_engine import LLMEngine, StreamOutput

TARGET, DRAFT = "weak-target-{}", "weak-draft-{}"  # of a shape
DRAFT_LAYERS: Final = 4
# Factor of the outputs of attention, and of layers after the draft's.
ATTENTION: Final = 0.0
LATE: Final = 0.03
_START_S: Final = 120.0
_CONTEXT: Final = 2048


@dataclass
class Decoded:
    """One answer: tokens per second after the first one, drafts, and accepted drafts."""

    rate: float
    drafts: int
    right: int


# A prompt, and tokens of its answer.
Decode = Callable[[list[int], int], Decoded]
# Token ids of the prompts of each kind.
Prompts = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Way:
    """An engine with its drafts, and the prompts that it answers."""

    engine: str
    name: str
    decode: Decode
    prompts: Prompts


def weaken(folder: PeerFolder, shape: str) -> None:
    """Writes the target and its draft, unless they are there."""
    source = make(folder, shape)
    target, draft = (folder.checkpoint(name.format(shape)) for name in (TARGET, DRAFT))
    if draft.exists():
        return
    weights = load_file(source / "model.safetensors")
    for name in weights:
        factor = ATTENTION if "o_proj" in name else 1.0
        if _layer(name) >= DRAFT_LAYERS and ("o_proj" in name or "down_proj" in name):
            factor *= LATE
        weights[name] = (weights[name].float() * factor).bfloat16()
    _write(source, target, weights, {})
    first = {name: weight for name, weight in weights.items() if _layer(name) < DRAFT_LAYERS}
    _write(source, draft, first, {"num_hidden_layers": DRAFT_LAYERS})


def _layer(name: str) -> int:
    found = re.search(r"\.layers\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _write(source: Path, target: Path, weights: dict[str, torch.Tensor], changed: dict[str, int]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | changed
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", {"format": "pt"})


def converted(folder: PeerFolder, name: str) -> Path:
    """A checkpoint for llama.cpp, in bfloat16."""
    target = folder.gguf(name, "bf16")
    if not target.exists():
        command: list[str | Path] = [
            folder.python("transformers"),
            Path(__file__).with_name("llama_converter.py"),
            folder.llama_source,
        ]
        command += [folder.checkpoint(name), "--outtype", "bf16", "--outfile", target]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return target


def fissile(target: Path, spec: SpeculativeConfig | None, quantize: str) -> LLMEngine:
    """The engine in this process."""
    config = Config(
        model=str(target),
        dtype="bfloat16",
        kernels="cpu",
        max_model_len=_CONTEXT,
        kv_cache_memory=1 << 29,
        enable_prefix_caching=False,
        speculative_config=spec,
        quantize=quantize,
        weights_cache=str(target.with_name("packed")),
    )
    engine = LLMEngine(config)
    if spec is not None:
        engine.core.measure_step_costs()
    return engine


def _by_engine(engine: LLMEngine, prompt: list[int], tokens: int) -> Decoded:
    arrivals: list[tuple[float, int]] = []

    def note(part: StreamOutput) -> None:
        if part.output_tokens:
            arrivals.append((time.perf_counter(), len(part.output_tokens)))

    stats = engine.core.scheduler.spec_stats
    drafts, right = stats.total_draft_tokens, stats.total_accepted_tokens
    params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    engine.generate([prompt], params, stream_callback=note)
    rate = (tokens - arrivals[0][1]) / (arrivals[-1][0] - arrivals[0][0])
    return Decoded(rate, stats.total_draft_tokens - drafts, stats.total_accepted_tokens - right)


@contextmanager
def llama(folder: PeerFolder, target: Path, threads: int, options: Sequence[str]) -> Iterator[Decode]:
    """A server of llama.cpp's, as long as it is used."""
    port = free_port()
    install = f"python -m tests.bench.peers.install llamacpp --folder {folder.root}"
    program = need(folder.llama_program("llama-server"), install)
    command = [str(program), "-m", str(target), "--host", HOST, "--port", str(port)]
    command += ["-c", str(_CONTEXT), "-np", "1", "-t", str(threads), "-tb", str(threads), "-fa", "on", "--no-webui"]
    command += ["--no-cache-prompt", "--cache-ram", "0"]
    with folder.log("llamacpp-speculation").open("ab") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        end = time.monotonic() + _START_S
        while not http_serves(port):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"llama-server {' '.join(options)} does not serve")
            time.sleep(0.2)
        yield partial(_by_llama, port)
    finally:
        process.terminate()
        process.wait()


def _by_llama(port: int, prompt: list[int], tokens: int) -> Decoded:
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        f"http://{HOST}:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        timings: dict[str, Any] = json.load(answer)["timings"]
    rate = 1e3 * (timings["predicted_n"] - 1) / timings["predicted_ms"]
    return Decoded(rate, timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


def prompts(plain: LLMEngine, options: argparse.Namespace) -> Prompts:
    """`--prompts` prompts of each kind, from answers of `plain`: weights of other dtypes give other answers."""
    rnd = random.Random(1)

    def drawn(count: int) -> list[int]:
        return [rnd.randrange(5, SHAPES[options.shape]["vocab_size"]) for _ in range(count)]

    params = {"temperature": 0.0, "max_tokens": options.tokens, "ignore_eos": True}
    begins = [drawn(8) for _ in range(options.prompts)]
    answers = [answer["token_ids"] for answer in plain.generate(begins, params)]
    changed = [[drawn(1)[0] if rnd.random() * 100 < options.other else token for token in each] for each in answers]
    return {
        "copy": _copies(begins, answers),
        f"copy, {options.other}% other tokens": _copies(begins, changed),
        "free": [drawn(options.tokens) for _ in range(options.prompts)],
    }


def _copies(begins: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    return [[*begin, *answer, *begin] for begin, answer in zip(begins, answers, strict=True)]


# How each engine decodes: its own lookup and draft model, with equal settings.
_LOOKUP: Final = SpeculativeConfig(8, NGRAM)
_LLAMA: Final = {
    "plain": (),
    "lookup": ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
    "lookup, its defaults": ("--spec-type", "ngram-simple"),
    "draft model": ("--spec-type", "draft-simple", "--spec-draft-n-max", "4"),
}


def measure(folder: PeerFolder, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints a line for each kind of prompts, engine and way; returns them for a file of results."""
    names = [name.format(options.shape) for name in (TARGET, DRAFT)]
    target, draft = (folder.checkpoint(name) for name in names)
    with ExitStack() as servers:
        ways: list[Way] = []
        for quantize in options.quantize:
            suffix = "" if quantize == QUANTIZE_NO else f", {quantize}"
            specs = {"plain": None, "lookup": _LOOKUP, "draft model": SpeculativeConfig(4, DRAFT_MODEL, str(draft))}
            engines = {way: fissile(target, spec, quantize) for way, spec in specs.items()}
            own = prompts(engines["plain"], options)
            ways += [Way("Fissile", way + suffix, partial(_by_engine, one), own) for way, one in engines.items()]
        for name, own_options in _LLAMA.items() if options.llama else ():
            whole, first = (converted(folder, each) for each in names)
            model = ("-md", str(first)) if name == "draft model" else ()
            decode = servers.enter_context(llama(folder, whole, options.threads, (*own_options, *model)))
            ways.append(Way("llama.cpp", name, decode, ways[0].prompts))
        rows = []
        for kind in ways[0].prompts:
            rows += [_row(kind, *found) for found in _in_turns(ways, kind, options)]
    return rows


def _in_turns(ways: list[Way], kind: str, options: argparse.Namespace) -> list[tuple[Way, list[Decoded]]]:
    found: list[tuple[Way, list[Decoded]]] = [(way, []) for way in ways]
    for way in ways:
        way.decode(way.prompts[kind][0], 16)
    for _ in range(options.rounds):
        for prompt in range(options.prompts):
            for way, decoded in found:
                decoded.append(way.decode(way.prompts[kind][prompt], options.tokens))
    return found


def _row(kind: str, way: Way, found: list[Decoded]) -> dict[str, Any]:
    drafts, right = sum(one.drafts for one in found), sum(one.right for one in found)
    rate, share = statistics.median(one.rate for one in found), right / drafts if drafts else 0.0
    per_answer = drafts / len(found)
    print(
        f"{kind}, {way.engine}, {way.name}: {rate:.1f} tokens/s, {per_answer:.0f} drafts an answer, {share:.0%} right",
        flush=True,
    )
    return {
        "prompts": kind,
        "engine": way.engine,
        "way": way.name,
        "rate": round(rate, 1),
        "drafts": round(per_answer, 1),
        "right": round(100 * share),
    }


def main() -> None:
    """Prints a line for each way and kind of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folder_option(parser)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=2, help="of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=int, default=20, help="%% of the tokens of a copied answer that are replaced")
    parser.add_argument("--quantize", nargs="+", choices=QUANTIZE, default=[QUANTIZE_NO], help="of Fissile's engines")
    parser.add_argument("--llama", action=argparse.BooleanOptionalAction, default=True, help="measures llama.cpp too")
    parser.add_argument("--prepare", action="store_true", help="only writes and converts the checkpoints")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes the figures there too")
    options = parser.parse_args()
    folder = PeerFolder(options.folder.resolve())
    weaken(folder, options.shape)
    for name in (TARGET, DRAFT) if options.llama else ():
        converted(folder, name.format(options.shape))
    if options.prepare:
        return
    torch.set_num_threads(options.threads)
    rows = measure(folder, options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
