"""Compares token streams of one model, run in many ways on this machine's GPU: each way must give the same bits.

    python -m tests.kernels.verify_streams run WAY --model FOLDER --out FILE.json [--requests 300] [--kernels triton]
    python -m tests.kernels.verify_streams compare FILE.json FILE.json [...]

`run` answers random requests in one of WAYS and writes token ids and logprobs. `compare` holds every file against the
first and ends with 1 if an answer differs. scripts/gpu_first_run.py runs all ways and compares them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from fissile.client import Client
from fissile.v1 import inference_pb2 as pb

from common.config import MIXED, CompilationConfig, Config, SpeculativeConfig
from common.params.sampling_params import SamplingParams
from tests.e2e.service import REPOSITORY, running_service
from worker.config.model_config import ModelConfig
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner

BLOCK_SIZE = 16
# Requests of a service that are in flight at once.
CLIENTS = 64
# Parameters that requests have in turn.
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.7, "top_p": 0.95, "presence_penalty": 0.5},
)


@dataclass(frozen=True)
class Way:
    """One way to run an engine.

    Attributes:
        config: fields of Config that differ from the defaults of `engine_config`.
        alone: True if each request is answered before the next one is added.
        launches_ahead: False if a step is launched only after the tokens of the one before it have been taken.
        drafts: fields of SpeculativeConfig; `model` is filled in with the checkpoint for methods that need one.
        through_service: True if requests go over gRPC, through a router and a worker process.
        finds_waits: True if PyTorch reports every call that waits for the GPU; one fails the run.
    """

    config: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    launches_ahead: bool = True
    drafts: dict[str, Any] | None = None
    through_service: bool = False
    finds_waits: bool = False


WAYS: dict[str, Way] = {
    "together": Way(),
    "alone": Way(alone=True),
    "eager": Way({"enforce_eager": True}),
    "not deferred": Way(launches_ahead=False),
    "chunks": Way({"max_num_batched_tokens": 96, "scheduling_policy": MIXED}),
    "few at once": Way({"max_num_seqs": 7}),
    "other graphs": Way({"compilation_config": CompilationConfig(cudagraph_capture_sizes=(3, 50))}),
    "preempted": Way({"num_kvcache_blocks": 160, "enable_prefix_caching": True}),
    "lookup drafts": Way(drafts={"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}),
    "model drafts": Way(drafts={"method": "draft_model", "num_speculative_tokens": 3, "adaptive": False}),
    "forbidden waits": Way(finds_waits=True),
    "service": Way(through_service=True),
}
Answer = dict[str, Any]


def requests(count: int, num_ids: int, longest: int, most_tokens: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Random prompts as token ids, a third of them with a shared beginning, and their sampling parameters."""
    draw = random.Random(count)
    shared = draw.choices(range(5, num_ids), k=longest)
    found = []
    for index in range(count):
        length = draw.choice((1, 2, BLOCK_SIZE, BLOCK_SIZE + 1, draw.randint(1, longest), draw.randint(1, longest)))
        prompt = draw.choices(range(5, num_ids), k=length)
        if index % 3 == 0:
            prompt = shared[: length // 2] + prompt[length // 2 :]
        params = {**KINDS[index % len(KINDS)], "seed": index, "max_tokens": draw.randint(1, most_tokens)}
        found.append((prompt, {**params, "ignore_eos": True, **({"logprobs": 2} if index % 4 == 0 else {})}))
    return found


def engine_config(options: argparse.Namespace, way: Way) -> Config:
    """Config of the engine that runs in a way."""
    settings: dict[str, Any] = {
        "model": str(options.model),
        "kernels": options.kernels,
        "max_model_len": options.longest + options.tokens + BLOCK_SIZE,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory": options.kv_memory,
    }
    if way.drafts is not None:
        model = str(options.model) if way.drafts["method"] == "draft_model" else ""
        settings["speculative_config"] = SpeculativeConfig(**way.drafts, model=model)
    return Config(**(settings | way.config))


def engine_answers(options: argparse.Namespace, way: Way) -> list[Answer]:
    """The answers of an engine in this process."""
    config = engine_config(options, way)
    if way.launches_ahead:
        engine = LLMEngine(config)
    else:
        runner = ModelRunner(config, ModelConfig.from_folder(config.model))
        num_blocks = options.kv_memory // runner.kv_block_bytes
        runner.allocate_kv_cache(num_blocks)
        runner.capture_graphs()
        engine = LLMEngine(Config(**{**config.__dict__, "num_kvcache_blocks": num_blocks}), runner=runner)
    given = _requests_of(options)
    waits = Waits() if way.finds_waits else None
    try:
        groups = [[each] for each in given] if way.alone else [given]
        answers = [
            answer
            for group in groups
            for answer in engine.generate(
                [prompt for prompt, _ in group], [SamplingParams(**params) for _, params in group]
            )
        ]
    finally:
        engine.close()
        if waits is not None:
            waits.end()
    return [
        {"tokens": each["token_ids"], "logprobs": [entry["raw"].hex() for entry in each.get("logprobs", [])]}
        for each in answers
    ]


class Waits:
    """Places in the code at which the host waits for the GPU, as PyTorch reports them from now on."""

    def __init__(self) -> None:
        self._places: Counter[str] = Counter()
        warnings.simplefilter("always")
        note: Any = self._note
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")

    def _note(self, message: Warning | str, *_: object) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frames = [each for each in traceback.extract_stack() if str(REPOSITORY) in each.filename]
            self._places[
                " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames[-6:-1]))
            ] += 1

    def end(self) -> None:
        """Prints the places.

        Raises:
            AssertionError: there are any.
        """
        torch.cuda.set_sync_debug_mode("default")
        for place, count in self._places.most_common():
            print(f"FAILED {count} waits at {place}", flush=True)
        assert not self._places, "a step waits for the GPU"


def service_answers(options: argparse.Namespace) -> list[Answer]:
    """The answers of a router and a worker process, over gRPC."""
    length = options.longest + options.tokens + BLOCK_SIZE
    worker_options = ["--kernels", options.kernels, "--max-model-len", str(length), "--max-num-seqs", "256"]
    memory = {"FISSILE_KV_CACHE_MEMORY": str(options.kv_memory)}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder), options.model, worker_options=worker_options, environment=memory) as service,
        Client([service.router.address]) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        return list(pool.map(lambda each: _asked(client, *each), _requests_of(options)))


def _asked(client: Client, prompt: list[int], params: dict[str, Any]) -> Answer:
    sampling = {name: value for name, value in params.items() if name != "logprobs"}
    wanted = pb.OutputOptions(return_token_ids=True, logprobs=params.get("logprobs"))
    answer = client.generate(prompt, **sampling, output_options=wanted).answers[0]
    return {"tokens": list(answer.token_ids), "logprobs": [entry.logprob.hex() for entry in answer.logprobs]}


def _requests_of(options: argparse.Namespace) -> list[tuple[list[int], dict[str, Any]]]:
    vocab_size = ModelConfig.from_folder(str(options.model)).vocab_size
    return requests(options.requests, vocab_size, options.longest, options.tokens)


def differences(expected: list[Answer], found: list[Answer]) -> list[str]:
    """A line for each answer that is not the expected one, with the first place where it differs."""
    lines = [] if len(expected) == len(found) else [f"{len(found)} answers instead of {len(expected)}"]
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        for key in ("tokens", "logprobs"):
            if one[key] != other[key]:
                place = next(
                    (i for i, (a, b) in enumerate(zip(one[key], other[key], strict=False)) if a != b), "its length"
                )
                lines.append(f"request {index}: {key} differ at {place} of {len(one[key])}")
                break
    return lines


def run(options: argparse.Namespace) -> int:
    """Answers the requests in one way and writes the file."""
    way, start = WAYS[options.way], time.monotonic()
    answers = service_answers(options) if way.through_service else engine_answers(options, way)
    options.out.write_text(json.dumps({"way": options.way, "answers": answers}))
    tokens = sum(len(answer["tokens"]) for answer in answers)
    print(f"{options.way}: {len(answers)} answers, {tokens} tokens, {time.monotonic() - start:.1f} s", flush=True)
    return 0


def compare(options: argparse.Namespace) -> int:
    """Prints a line for each file, and the first differences. Returns 1 if there are any."""
    missing = [path for path in options.files if not path.is_file()]
    first, *others = (json.loads(path.read_text()) for path in options.files if path not in missing)
    print(*(f"FAILED {path.stem}: no answers" for path in missing), sep="\n", end="\n" if missing else "")
    failed = len(missing)
    for other in others:
        lines = differences(first["answers"], other["answers"])
        failed += bool(lines)
        count = len(first["answers"])
        print(f"{'FAILED' if lines else 'ok    '} {other['way']:16} {count - len(lines)} of {count} as {first['way']}")
        print(*(f"         {line}" for line in lines[:8]), sep="\n", end="\n" if lines else "", flush=True)
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run", help="Answer the requests in one way.")
    one.add_argument("way", choices=list(WAYS))
    one.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    one.add_argument("--out", type=Path, required=True, help="file for the answers")
    one.add_argument("--kernels", default="triton")
    one.add_argument("--requests", type=int, default=300)
    one.add_argument("--longest", type=int, default=400, help="most tokens of a prompt")
    one.add_argument("--tokens", type=int, default=24, help="most tokens of an answer")
    one.add_argument("--kv-memory", type=int, default=4 << 30, help="bytes of the KV cache")
    one.set_defaults(call=run)
    both = commands.add_parser("compare", help="Hold files against the first one.")
    both.add_argument("files", type=Path, nargs="+")
    both.set_defaults(call=compare)
    options = parser.parse_args(arguments)
    code: int = options.call(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
