"""One request, one answer: on the demo model every stream is that of the sequence computed alone
(docs/explanation/determinism.md), whatever the policy, the cache, the size of the chunks, deferred output, the pool and
the other requests.

float32, the batch-invariant back ends, a KV cache that begins full of NaN: a slot that is read before it is written
shows. A workload that fails is repeated with `check(its number, its setting)`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import MIXED, PREFILL_FIRST, SCHEDULING_POLICIES, Config, SpeculativeConfig
from common.constraints.forms import Constraint
from common.constraints.lark import canonical
from common.limits import MOST_FORCED
from common.params.config_parts import NGRAM
from common.params.logprobs import LOGPROBS_KINDS
from common.params.sampling_params import SamplingParams
from common.text.tokenizer import Tokenizer
from deploy.demo.questions import questions
from kernels.interface import KernelBackend
from kernels.select import CPU_BACKENDS, select_backend
from kernels.torch_backend.attention import PagedKVCache
from tests.covering import covering
from tests.native import backend_or_skip
from tests.parity.drafts import RandomProposer, streams_of
from tests.parity.draws import changes_of_logits
from tests.unit.mutants import MUTANTS as TRAPS
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.config.engine_config import with_special_tokens
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch, ScheduledBatchOutput
from worker.engine.block_manager import BlockManager
from worker.engine.executor import PipelinedExecutor
from worker.engine.prefix_cache import PrefixCache
from worker.engine.speculation.draft_controller import DraftController
from worker.grammars import Grammars
from worker.llm_engine import LLMEngine
from worker.model import model_runner
from worker.model.logprobs import TokenLogprobsMaker
from worker.model.model_runner import ModelRunner
from worker.model.sampler import Sampler

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
MODEL_LEN = 128
# Token ids that requests name.
NUM_IDS = 1000
NUM_WORKLOADS, NUM_LONG = 4, 60
MAX_STEPS = 3_000
# Some that end soon, and some that `max_tokens` cuts; one forces text.
GRAMMARS = [
    canonical(Constraint.of(given))
    for given in (
        {"json_schema": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 3}},
        {"json_object": True},
        {"regex": "The answer is: [a-z]{2,9}( and [a-z]{2,9}){1,4}[.!]"},
        {"choices": ["yes", "no", "a longer choice of many letters"]},
    )
]
# Chunks that end anywhere in a block; chunks of several sequences; whole prompts.
BUDGETS = (20, 48, 512)
# One for each combination of switches; every second pool is tight, and small blocks fill it best.
BLOCK_SIZES = (16, 1, 32, 16, 32, 1, 16, 1)

# Fields of answers with logprobs, on request.
LOGPROBS = ("logprobs", "logprob", "prompt_logprobs")

Key = tuple[str, int]


@dataclass(frozen=True)
class Setting:
    """How an engine runs; none of it may show in a stream. A tight pool holds just one longest sequence.

    With `ahead` a step is launched before the one before it has ended, as on a GPU. With `drafts` a step verifies at
    most so many of a sequence, of which some are right (test_speculation.py).
    """

    policy: str = PREFILL_FIRST
    budget: int = 512
    caching: bool = False
    deferred: bool = False
    ahead: bool = False
    tight: bool = False
    block_size: int = 16
    max_num_seqs: int = 8
    kernels: str = "torch"
    drafts: int = 0

    @property
    def config(self) -> Config:
        return Config(
            model=str(DEMO),
            dtype="float32",
            kernels=self.kernels,
            max_model_len=MODEL_LEN,
            scheduling_policy=self.policy,
            max_num_batched_tokens=self.budget,
            enable_prefix_caching=self.caching,
            deferred_output=self.deferred,
            num_kvcache_blocks=MODEL_LEN // self.block_size * (1 if self.tight else 12),
            kv_cache_block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            speculative_config=SpeculativeConfig(self.drafts, NGRAM, adaptive=False) if self.drafts else None,
        )


ALONE = Setting(max_num_seqs=1)
TIGHT = Setting(tight=True, block_size=1)


@dataclass(frozen=True)
class Request:
    """One request of a workload: when it comes, and when it is aborted, in steps."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    leaves: int | None


@cache
def texts() -> list[list[int]]:
    """What people say to the demo model, as token ids of several exchanges in a row."""
    tokenizer, asked = Tokenizer.from_folder(DEMO), questions()
    lines = [f"{one.user} {one.assistant} " for one in asked]
    return [tokenizer.encode("".join(lines[i : i + 8])) for i in range(0, len(lines), 8)]


def workload(number: int) -> dict[str, Request]:
    """Requests by id: prompts with common beginnings, every kind of sampling, arrivals while others run, aborts."""
    rnd, logprobs, grammars = (random.Random(seed) for seed in (number, f"logprobs {number}", f"grammars {number}"))
    beginnings = [[], *(rnd.choice(texts())[:n] for n in (16, 37, 48))]
    requests = {f"{number}-{i}": _request(rnd, rnd.choice(beginnings)) for i in range(5)}
    steered = {name: _with_logprobs(logprobs, request) for name, request in requests.items()}
    return {name: _with_grammar(grammars, request) for name, request in steered.items()}


def _request(rnd: random.Random, beginning: list[int]) -> Request:
    prompt = beginning + rnd.choice(texts())[: rnd.randint(1, 36)]
    arrives = rnd.choice([0, 0, rnd.randint(0, 30)])
    leaves = arrives + rnd.randint(0, 15) if rnd.random() < 0.1 else None
    max_tokens = rnd.randint(1, 28)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rnd.choice([0, max_tokens // 2]),
        ignore_eos=rnd.random() < 0.6,
        stop_token_ids=tuple(rnd.sample(range(5, NUM_IDS), rnd.choice([0, 60, 60]))),
        **_sampling(rnd),
    )
    return Request(prompt, params, arrives, leaves)


def _with_logprobs(rnd: random.Random, request: Request) -> Request:
    """A request with or without logprobs, of generated and of given tokens."""
    asked: dict[str, Any] = {}
    if rnd.random() < 0.4:
        asked |= {"logprobs": rnd.choice([0, 3, 20]), "logprobs_kind": rnd.choice(LOGPROBS_KINDS)}
    if rnd.random() < 0.4:
        asked |= {"prompt_logprobs": rnd.choice([0, 2]), "prompt_logprobs_start": rnd.randint(1, len(request.prompt))}
    if asked and rnd.random() < 0.5:
        asked["logprob_token_ids"] = tuple(rnd.sample(range(5, 1000), rnd.choice([1, 3])))
    return replace(request, params=replace(request.params, **asked))


def _with_grammar(rnd: random.Random, request: Request) -> Request:
    """A request with or without a grammar; its other masks may leave no token."""
    if rnd.random() > 0.2:
        return request
    return replace(request, params=replace(request.params, grammar=rnd.choice(GRAMMARS)))


def _sampling(rnd: random.Random) -> dict[str, Any]:
    """Greedy or seeded, with or without filters, penalties, biases and masks."""
    given: dict[str, Any] = {"temperature": rnd.choice([0.0, 0.7, 1.0, 1.5]), "n": rnd.choice([1, 1, 1, 3])}
    if rnd.random() < 0.4:
        given["seed"] = rnd.randrange(2**64)
    return given | changes_of_logits(rnd, 0.4, NUM_IDS)


def poisoned(backend: KernelBackend) -> KernelBackend:
    """Fills KV caches with NaN, except the block for positions past a sequence's end."""
    allocate = backend.kv_cache.allocate

    def allocate_kv(*given: Any) -> PagedKVCache:
        made: PagedKVCache = allocate(*given)
        made.data[:, :, :-1] = torch.nan
        return made

    backend.kv_cache.allocate = allocate_kv  # type: ignore[assignment, method-assign]
    return backend


@dataclass
class Watched:
    """The model's runner, which records properties of the batches: proof that a setting has its effect."""

    runner: ModelRunner
    forces: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def grammars(self) -> Grammars | None:
        return self.runner.grammars

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        self.watch(batch)
        self.runner.forces = self.forces
        return self.runner.forward(batch)

    def launch(self, batch: ScheduledBatch) -> Callable[[], ScheduledBatchOutput]:
        self.watch(batch)
        self.seen["launched ahead"] += 1
        self.runner.forces = self.forces
        return self.runner.launch(batch)

    def watch(self, batch: ScheduledBatch) -> None:
        self.seen["prompts and decodes in one step"] += 0 < batch.total_seqs_num_prefill < batch.total_seqs_num
        self.seen["chunks"] += batch.is_final.count(False)
        self.seen["hits"] += sum(n > 0 for n in batch.num_cached_tokens)
        self.seen["constrained"] += sum(bool(history.params.grammar) for history in batch.histories.values())
        self.seen["copies"] += len(batch.block_copies)
        self.seen["rows before their token"] += sum(batch.from_last_output)
        self.seen["drafts beside prompts"] += bool(batch.num_spec_step and batch.total_seqs_num_prefill)
        self.seen["plain steps"] += batch.is_plain_decode


@cache
def loaded(block_size: int, kernels: str) -> ModelRunner:
    """The model, loaded once for each block size and back end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "select_backend", lambda *choice: poisoned(select_backend(*choice)))
        config, model_config = Setting(block_size=block_size, kernels=kernels).config, ModelConfig.from_folder(DEMO)
        return ModelRunner(with_special_tokens(config, model_config), model_config)


def make_engine(setting: Setting, watched: Watched) -> LLMEngine:
    watched.runner.allocate_kv_cache(setting.config.num_kvcache_blocks)
    engine = LLMEngine(setting.config, runner=watched)
    if setting.ahead:
        engine.core.executor = PipelinedExecutor(watched.launch, time.monotonic)
    return engine


@cache
def alone(number: int, kernels: str = "torch") -> dict[Key, dict[str, Any]]:
    """Every answer of a workload, one sequence after the other, one token a step."""
    watched = Watched(loaded(ALONE.block_size, kernels), forces=False)
    engine, requests = make_engine(replace(ALONE, kernels=kernels), watched), workload(number)
    answers = [
        answer
        for request_id, request in requests.items()
        for answer in engine.generate([request.prompt], request.params, request_ids=[request_id])
    ]
    return {(answer["request_id"], answer["index"]): answer for answer in answers}


def together(number: int, setting: Setting, watched: Watched) -> dict[Key, dict[str, Any]]:
    """The same requests as they come, the answers by request and choice."""
    engine, requests = make_engine(setting, watched), workload(number)
    if setting.drafts:
        streams = streams_of(alone(number, setting.kernels).values())
        engine.core.scheduler.drafter.proposer = RandomProposer(streams, NUM_IDS, random.Random(number))
    else:
        # On a busy machine text that grammars force may not pay.
        engine.core.scheduler.drafter.controller = DraftController(MOST_FORCED, adapts=False)
    # Steps in which everything waits for a grammar take no time, and would use up MAX_STEPS.
    for request in requests.values():
        if request.params.grammar and watched.grammars is not None:
            watched.grammars.begin(request.params.grammar).result()
    answers: dict[Key, dict[str, Any]] = {}
    for step in range(MAX_STEPS):
        for request_id, request in requests.items():
            if request.arrives == step:
                engine.add_request(request.prompt, request.params, request_id=request_id)
            if request.leaves == step:
                engine.abort(request_id)
        for answer in engine.step():
            assert (answer["request_id"], answer["index"]) not in answers
            answers[answer["request_id"], answer["index"]] = answer
        if step > max(request.arrives for request in requests.values()) and not engine.core.has_unfinished():
            break
    engine.core.scheduler.check_integrity()
    assert engine.core.load().free_blocks == setting.config.num_kvcache_blocks
    watched.seen["preemptions"] += engine.core.scheduler.lifecycle.num_preemptions
    watched.seen["forced"] += engine.core.scheduler.forced_stats.total_accepted_tokens
    watched.seen["drafts"] += engine.core.scheduler.spec_stats.total_draft_tokens
    watched.seen["right drafts"] += engine.core.scheduler.spec_stats.total_accepted_tokens
    return answers


def check(number: int, setting: Setting, runner: ModelRunner | None = None) -> Counter[str]:
    """Compares a workload with its sequences computed alone. What the batches were like."""
    expected = alone(number, setting.kernels)
    watched = Watched(runner or loaded(setting.block_size, setting.kernels))
    answers = together(number, setting, watched)
    assert answers.keys() == expected.keys()
    for key, answer in answers.items():
        if answer["finish_reason"] == "aborted":
            whole = expected[key]["token_ids"]
            assert answer["token_ids"] == whole[: len(answer["token_ids"])], (number, setting, key)
            for name in {"logprobs", "prompt_logprobs"} & answer.keys():
                assert answer[name] == expected[key][name][: len(answer[name])], (number, setting, key, name)
            watched.seen["aborted"] += 1
        else:
            names = ("token_ids", "text", "finish_reason", *LOGPROBS)
            assert [answer.get(name) for name in names] == [expected[key].get(name) for name in names], (
                number,
                setting,
                key,
            )
            watched.seen["prompt logprobs"] += bool(answer.get("prompt_logprobs"))
            watched.seen["logprobs"] += bool(answer.get("logprobs"))
    return watched.seen


def settings(policy: str, budget: int, kernels: str = "torch") -> Iterator[Setting]:
    switches = itertools.product([False, True], repeat=3)
    for (caching, deferred, tight), block_size in zip(switches, BLOCK_SIZES, strict=True):
        yield Setting(policy, budget, caching, deferred, deferred and caching, tight, block_size, kernels=kernels)


@pytest.fixture(scope="module", params=list(CPU_BACKENDS))
def kernels(request: pytest.FixtureRequest) -> str:
    """Each back end that runs on this machine."""
    return backend_or_skip(request.param).name


@pytest.mark.parametrize(
    ("kernels", "policy", "budget"), covering(list(CPU_BACKENDS), SCHEDULING_POLICIES, BUDGETS), indirect=["kernels"]
)
def test_streams_equal_each_sequence_alone(policy: str, budget: int, kernels: str) -> None:
    numbers, seen, preempted, hits, late = itertools.cycle(range(NUM_WORKLOADS)), Counter[str](), 0, 0, 0
    for setting in settings(policy, budget, kernels):
        one = check(next(numbers), setting)
        preempted += one["preemptions"] if setting.tight else 0
        hits += one["hits"] if setting.caching else 0
        late += one["rows before their token"] if setting.deferred else 0
        seen += one
    assert preempted > 0
    assert hits > 0
    assert late > 0
    assert seen["copies"] > 0
    assert seen["launched ahead"] > 0
    assert seen["forced"] > 0
    assert seen["aborted"] > 0
    assert seen["prompt logprobs"] > 0
    assert seen["logprobs"] > 0
    assert (seen["prompts and decodes in one step"] > 0) == (policy == MIXED)
    assert (seen["chunks"] > 0) == (budget < MODEL_LEN)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("number", range(NUM_WORKLOADS, NUM_LONG))
def test_many_workloads_under_every_setting(number: int, kernels: str) -> None:
    for policy, budget in itertools.product(SCHEDULING_POLICIES, BUDGETS):
        for setting in settings(policy, budget, kernels):
            check(number, setting)


@pytest.mark.slow
def test_workload_streams_are_distinct() -> None:
    answers = [answer for number in range(NUM_WORKLOADS) for answer in alone(number).values()]
    streams = {tuple(answer["token_ids"]) for answer in answers if len(answer["token_ids"]) > 4}
    assert len(streams) > len(answers) // 2
    assert {answer["finish_reason"].partition("_")[0] for answer in answers} >= {"stop", "max"}


class RemembersTables(ModelRunner):
    """Keeps each sequence's block table and extends it only, so that after a preemption it reads blocks of others."""

    def __init__(self) -> None:
        model_config = ModelConfig.from_folder(DEMO)
        super().__init__(with_special_tokens(TIGHT.config, model_config), model_config)
        self.tables: dict[int, list[int]] = {}

    def forward(self, batch: ScheduledBatch) -> ScheduledBatchOutput:
        for i, (seq_id, table) in enumerate(zip(batch.req_ids, batch.tables, strict=True)):
            known = self.tables.setdefault(seq_id, [])
            known += table[len(known) :]
            batch.tables[i] = known[: len(table)]
        return super().forward(batch)


_POSITIONS = "batch.known_token_ids, positions"
_SAMPLED_AT = "positions=positions"
MUTANTS = [
    Mutant("noise by the step", Sampler, "sample_rows", _SAMPLED_AT,
           "positions=own * 0 + batch.total_tokens_num"),
    Mutant("noise without the choice", Sampler, "sample_rows", "choices=sampling.choices[own]",
           "choices=own * 0"),
    Mutant("positions off by one when a prompt goes on", ModelRunner, "prepare_model", _POSITIONS,
           f"{_POSITIONS} + np.repeat((starts > 0) & (lengths > 1), lengths)"),
    Mutant("the neighbour's token", Sampler, "with_late_tokens", "self.last.place[batch.req_ids[i]]", "0"),
    # A block that can be found before its last slot is written, and the token of a chunk's last row.
    Mutant("t20", BlockManager, "publish", "seq.num_computed_tokens", "seq.num_tokens"),
    Mutant("logprobs of a prompt from the cache", PrefixCache, "_hittable", "seq.num_reusable_tokens",
           "(seq.num_tokens - 1)"),
    Mutant("logprobs of what sampling has changed", TokenLogprobsMaker, "sampled", "asked.raw",
           "logits[asked.places]"),
    *(mutant for mutant in TRAPS if mutant.trap == "t31"),
]  # fmt: skip


# The engine stumbles over a block that is published before all of it is there.
BREAKS = {"t20": LookupError}


def fails(
    tried: Iterable[Setting],
    runner: ModelRunner | None = None,
    objections: tuple[type[BaseException], ...] = OBJECTIONS,
) -> bool:
    """True if any of the workloads tells that something is wrong."""
    try:
        for number, setting in zip(itertools.cycle(range(NUM_WORKLOADS)), tried, strict=False):
            check(number, setting, runner)
    except objections:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant) -> None:
    for number in range(NUM_WORKLOADS):
        alone(number, ALONE.kernels)
    each = itertools.chain.from_iterable(itertools.starmap(settings, itertools.product(SCHEDULING_POLICIES, BUDGETS)))
    with mutant.applied():
        assert fails(each, objections=(*OBJECTIONS, *([BREAKS[mutant.trap]] if mutant.trap in BREAKS else [])))


@pytest.mark.slow
def test_stale_block_table_is_detected() -> None:
    for number in range(NUM_WORKLOADS):
        check(number, TIGHT)
    assert fails([TIGHT] * NUM_WORKLOADS, RemembersTables())
