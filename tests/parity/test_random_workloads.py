"""Random workloads on the native kernels, many sequences at a time: tokens and logits to the bit those of each request
alone (docs/explanation/determinism.md).

Beside test_equality.py, which varies how requests come and go in few-row batches and float32: here 2 to 64 requests run
at once in bfloat16, on one thread or two, and every row of logits that a token was drawn from is compared. A request's
reference is computed once, alone in a fresh engine, on one thread, its prompt in one piece, without a prefix cache; the
workloads draw from a fixed stock of requests, so that hundreds of them are cheap. A workload that fails is repeated
with `check(model, variant, its number)`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from common.config import SCHEDULING_POLICIES, Config
from common.params.sampling_params import SamplingParams
from kernels.cpu import library
from kernels.select import select_backend
from tests.checkpoints import make_checkpoint
from tests.native import native_library
from tests.parity.draws import changes_of_logits
from tests.parity.test_equality import DEMO, poisoned
from tests.shapes import QWEN3_60M
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.llm_engine import LLMEngine
from worker.model import model_runner
from worker.model.model_runner import ModelInput, ModelRunner

MODEL_LEN: Final = 160
STOCK: Final = 64
MAX_STEPS: Final = 5_000
BLOCK_SIZES: Final = (1, 16, 32)
# The shapes; how many of their workloads run as a rule, and how many in `make test-long`.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16},
    "demo": {},
    # Its vocabulary is padded beyond the tokenizer's.
    "60m": QWEN3_60M,
}
NUM_SHORT: Final = {("tiny", "bfloat16"): 24, ("demo", "bfloat16"): 4}
NUM_LONG: Final = {"tiny": 300, "demo": 200, "60m": 60}
# What the weights are kept in: fields of Config.
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
}

Case = tuple[str, str]
# A request, its choice, and the number of tokens before the logits' position.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class Setting:
    """How an engine runs; none of it may show in a token or a logit."""

    policy: str
    budget: int
    caching: bool
    deferred: bool
    block_size: int
    num_blocks: int
    max_num_seqs: int
    threads: int

    def config(self, folder: Path, variant: str) -> Config:
        return Config(
            model=str(folder),
            kernels="cpu",
            max_model_len=MODEL_LEN,
            scheduling_policy=self.policy,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.caching,
            deferred_output=self.deferred,
            num_kvcache_blocks=self.num_blocks,
            kv_cache_block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            **VARIANTS[variant],
        )


ALONE: Final = Setting(SCHEDULING_POLICIES[0], MODEL_LEN, False, False, 16, MODEL_LEN // 16, 1, 1)


@dataclass
class Recorder(ModelRunner):
    """A model's runner that keeps a digest of each row of logits that a token was drawn from.

    A row that is computed again, after a preemption, has to give the same. Steps in which all are greedy make no
    logits; here they are made beside, of the same hidden states.
    """

    given: Config
    seen: Counter[str] = field(default_factory=Counter)
    rows: dict[Place, bytes] = field(default_factory=dict)
    batch: ScheduledBatch = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(self.given, ModelConfig.from_folder(self.given.model))

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.seen["prompts and decodes in one step"] += 0 < batch.total_seqs_num_prefill < batch.total_seqs_num
        self.seen["chunks"] += batch.is_final.count(False)
        self.seen["hits"] += sum(n > 0 for n in batch.num_cached_tokens)
        self.seen["copies"] += len(batch.block_copies)
        self.seen["most rows"] = max(self.seen["most rows"], len(batch.req_ids))
        self.seen["decodes of 33 or more"] += batch.total_seqs_num_decode > 32
        self.seen["greedy steps"] += batch.is_greedy
        self.batch = batch
        return super().forward(batch)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = super()._logits(states)
        self.record(logits)
        return logits

    def _states(self, step: ModelInput) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        final, before_targets, hidden = super()._states(step)
        if self.batch.is_greedy:
            self.record(self.model.compute_logits(final))
        return final, before_targets, hidden

    def record(self, logits: torch.Tensor) -> None:
        batch, known = self.batch, logits[:, : self.sampled_ids].numpy()
        final = [i for i, last in enumerate(batch.is_final) if last]
        for row, i in zip(known, final, strict=True):
            place = int(batch.sampling.seeds[i]), int(batch.sampling.choices[i]), batch.context_lens[i]
            digest = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
            assert self.rows.setdefault(place, digest) == digest, f"{place} computed again gives other logits"


@dataclass(frozen=True)
class Request:
    """One request of the stock; its number is its seed."""

    number: int
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Answers:
    """What came of requests: tokens and the reason for their end by number and choice, digests of logits by place."""

    streams: dict[tuple[int, int], tuple[list[int], str]]
    rows: Mapping[Place, bytes]


@cache
def stock(model: str) -> list[Request]:
    """The requests that workloads draw from: groups with a common beginning, some much longer than others."""
    rnd = random.Random(f"stock of {model}")
    ids = json.loads((FOLDERS[model] / "config.json").read_text("utf-8"))["vocab_size"]
    beginnings = [[], *([rnd.randrange(5, ids) for _ in range(n)] for n in (16, 33, 64))]
    return [_request(rnd, number, rnd.choice(beginnings), ids) for number in range(STOCK)]


def _request(rnd: random.Random, number: int, beginning: list[int], ids: int) -> Request:
    own = rnd.choice([rnd.randint(1, 20), rnd.randint(1, 20), rnd.randint(20, 70)])
    params = SamplingParams(
        seed=number,
        n=rnd.choice([1, 1, 1, 1, 2]),
        max_tokens=rnd.choice([rnd.randint(1, 12), rnd.randint(12, 24)]),
        ignore_eos=rnd.random() < 0.8,
        temperature=rnd.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        **changes_of_logits(rnd, 0.25, ids),
    )
    return Request(number, beginning + [rnd.randrange(5, ids) for _ in range(own)], params)


def workload(model: str, number: int) -> tuple[Setting, dict[int, list[Request]]]:
    """How the engine runs, and the requests by the step they come in."""
    rnd = random.Random(f"workload {number} of {model}")
    size = rnd.choice(BLOCK_SIZES)
    # The tightest pool just holds the longest sequence, and would take long with many; the widest holds all of them.
    tokens = rnd.choice([1, 5, 10, 40, 40]) * MODEL_LEN
    counts = [rnd.randint(2, 8), rnd.randint(9, 32), rnd.randint(33, 64), 64]
    chosen = rnd.sample(stock(model), rnd.choice(counts[:1] if tokens == MODEL_LEN else counts))
    setting = Setting(
        policy=rnd.choice(SCHEDULING_POLICIES),
        budget=rnd.choice([20, 64, 200, 1024]),
        caching=rnd.random() < 0.5,
        deferred=rnd.random() < 0.3,
        block_size=size,
        num_blocks=tokens // size,
        max_num_seqs=rnd.choice([64, 64, max(2, len(chosen) // 2)]),
        threads=rnd.choice([1, 2]),
    )
    spread = rnd.choice([0, 0, 5, 30])
    arrivals: dict[int, list[Request]] = {}
    for request in chosen:
        arrivals.setdefault(rnd.randint(0, spread), []).append(request)
    return setting, arrivals


FOLDERS: Final[dict[str, Path]] = {"demo": DEMO}


@pytest.fixture(scope="module", autouse=True)
def _checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Writes the tiny model; leaves the kernels with the threads that they had."""
    native = native_library()
    threads = native.fissile_threads()
    FOLDERS["tiny"] = make_checkpoint(tmp_path_factory.mktemp("tiny"), dtype="bfloat16", **SHAPES["tiny"])
    yield
    native.fissile_set_threads(threads)


@cache
def loaded(model: str, variant: str, block_size: int) -> Recorder:
    """The model, loaded once for each block size; its KV cache begins full of NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "select_backend", lambda *choice: poisoned(select_backend(*choice)))
        return Recorder(replace(ALONE, block_size=block_size).config(FOLDERS[model], variant))


def make_engine(case: Case, setting: Setting, runner: Recorder) -> LLMEngine:
    """A fresh engine with an empty KV cache, and threads as the setting says."""
    library.load().fissile_set_threads(setting.threads)
    runner.rows = {}
    runner.allocate_kv_cache(setting.num_blocks)
    return LLMEngine(setting.config(FOLDERS[case[0]], case[1]), runner=runner)


@cache
def alone(case: Case, number: int) -> Answers:
    """The answers of one request of the stock, alone in the engine."""
    model, variant = case
    request = stock(model)[number]
    runner = loaded(model, variant, ALONE.block_size)
    engine = make_engine(case, ALONE, runner)
    made = engine.generate([request.prompt], request.params)
    streams = {(number, one["index"]): (one["token_ids"], one["finish_reason"]) for one in made}
    return Answers(streams, runner.rows)


def together(case: Case, setting: Setting, arrivals: Mapping[int, list[Request]], runner: Recorder) -> Answers:
    """The requests as they come."""
    engine, streams = make_engine(case, setting, runner), {}
    for step in range(MAX_STEPS):
        for request in arrivals.get(step, ()):
            engine.add_request(request.prompt, request.params, request_id=str(request.number))
        for one in engine.step():
            streams[int(one["request_id"]), one["index"]] = one["token_ids"], one["finish_reason"]
        if step >= max(arrivals) and not engine.core.has_unfinished():
            break
    engine.core.scheduler.check_integrity()
    runner.seen["preemptions"] += engine.core.scheduler.lifecycle.num_preemptions
    return Answers(streams, runner.rows)


def check(model: str, variant: str, number: int, runner: Recorder | None = None) -> Counter[str]:
    """Compares a workload with its requests alone. What its batches were like."""
    case = model, variant
    setting, arrivals = workload(model, number)
    numbers = [request.number for requests in arrivals.values() for request in requests]
    expected = [alone(case, each) for each in numbers]
    runner = runner or loaded(model, variant, setting.block_size)
    runner.seen = Counter()
    answers = together(case, setting, arrivals, runner)
    told = (model, variant, number, setting)
    streams = {key: stream for one in expected for key, stream in one.streams.items()}
    rows = {place: digest for one in expected for place, digest in one.rows.items()}
    keys = streams.keys() | answers.streams.keys()
    wrong_streams = sorted(key for key in keys if streams.get(key) != answers.streams.get(key))
    # Deferred output computes a row after the last token, so there may be more rows.
    wrong_rows = sorted(place for place in rows if answers.rows.get(place) != rows[place])
    assert not wrong_streams, (told, wrong_streams)
    assert not wrong_rows, (told, wrong_rows[:8])
    return runner.seen


def check_all(model: str, variant: str, numbers: Iterable[int]) -> Counter[str]:
    """Many workloads. What their batches were like."""
    seen = Counter[str]()
    for number in numbers:
        one = check(model, variant, number)
        most = max(seen["most rows"], one["most rows"])
        seen += one
        seen["most rows"] = most
    return seen


def assert_met(seen: Counter[str]) -> None:
    """The workloads met every case that they should test."""
    mixed, wide = "prompts and decodes in one step", "decodes of 33 or more"
    for what in ("preemptions", "hits", "copies", "chunks", "greedy steps", mixed, wide):
        assert seen[what] > 5, (what, seen)
    assert seen["most rows"] > 50, seen


@pytest.mark.parametrize(
    ("model", "variant"), [("tiny", "bfloat16"), pytest.param("demo", "bfloat16", marks=pytest.mark.slow)]
)
def test_tokens_and_logits_equal_each_request_alone(model: str, variant: str) -> None:
    seen = check_all(model, variant, range(NUM_SHORT[model, variant]))
    if (model, variant) == ("tiny", "bfloat16"):
        assert_met(seen)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("part", range(4))
def test_fresh_workloads(part: int, fresh_seed: int) -> None:
    check_all("tiny", "bfloat16", [random.Random(fresh_seed).getrandbits(48)])


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", NUM_LONG)
def test_hundreds_of_workloads(model: str, variant: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if model not in FOLDERS:
        FOLDERS[model] = make_checkpoint(tmp_path_factory.mktemp(model), dtype="bfloat16", **SHAPES[model])
    assert_met(check_all(model, variant, range(1000, 1000 + NUM_LONG[model])))


def test_stock_answers_are_distinct() -> None:
    answers = [alone(("tiny", "bfloat16"), number) for number in range(STOCK)]
    # Greedy choices of one request are the same.
    first = [tokens for one in answers for (_, choice), (tokens, _) in one.streams.items() if choice == 0]
    long = [tuple(tokens) for tokens in first if len(tokens) > 4]
    assert len(set(long)) > 0.9 * len(long)
    assert len({digest for one in answers for digest in one.rows.values()}) > 2 * STOCK


class SeesItsNeighbours(Recorder):
    """One bit of one logit of rows that share their step with more than eight others is another."""

    def record(self, logits: torch.Tensor) -> None:
        if len(logits) > 8:
            logits = logits.clone()
            logits.view(torch.int32)[:, 7] ^= 1
        super().record(logits)


def test_one_changed_logit_bit_is_detected() -> None:
    faulty = SeesItsNeighbours(ALONE.config(FOLDERS["tiny"], "bfloat16"))
    number = next(n for n in range(NUM_SHORT["tiny", "bfloat16"]) if _fits_the_fault(workload("tiny", n)[0]))
    assert check("tiny", "bfloat16", number)["most rows"] > 8
    with pytest.raises(AssertionError):
        check("tiny", "bfloat16", number, faulty)


def _fits_the_fault(setting: Setting) -> bool:
    return setting.block_size == ALONE.block_size and setting.num_blocks >= 40 and setting.max_num_seqs > 8
