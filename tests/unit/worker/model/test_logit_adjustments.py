"""Penalties, biases and masks against brute force, transformers' processors and whole streams."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config
from common.params.sampling_checks import float32
from common.params.sampling_params import SamplingParams
from kernels.interface import SampleParams
from kernels.penalties import penalize
from kernels.sampling import sample, write_biases, write_masks
from tests.checkpoints import make_checkpoint
from worker.engine.batch import ScheduledBatch, TokenHistory
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine
from worker.model.logit_adjustments import SeenTokens
from worker.model.logit_masks import LogitMasks
from worker.model.model_runner import ModelRunner

pytestmark = pytest.mark.each_value

VOCAB = 24
EOS = frozenset({3, 9})
BLOCK = 16
NEW_TOKENS = 16


def sequence(prompt: list[int], output: list[int], **params: Any) -> Sequence:
    return Sequence([*prompt, *output], BLOCK, SamplingParams(**params), num_prompt_tokens=len(prompt))


def batch_of(seqs: list[Sequence]) -> ScheduledBatch:
    return ScheduledBatch({seq.id: seq for seq in seqs}, [seq.num_tokens for seq in seqs], 0)


def steered(logits: np.ndarray, seqs: list[Sequence]) -> np.ndarray:
    """Logits [S, V] as the sampler sees them after penalties, biases and masks."""
    changed = logits.copy()
    histories = batch_of(seqs).histories
    penalized = {row: history for row, history in histories.items() if history.params.penalized}
    if (found := SeenTokens().penalties(penalized)) is not None:
        penalize(changed, found)
    masks = LogitMasks(EOS)
    write_biases(changed, masks.biased(histories, VOCAB))
    write_masks(changed, masks.allowed(histories, VOCAB), masks.masked(histories, {}, no_late_tokens, VOCAB))
    return changed


def no_late_tokens(places: list[int]) -> torch.Tensor:
    raise AssertionError("nothing is late")


def reference(logits: list[float], seq: Sequence) -> list[float]:
    """One row in Python floats, rounded to float32 at every operation, id by id."""
    params, output = seq.sampling_params, seq.completion_token_ids
    seen, counts, penalty = set(seq.token_ids), Counter(output), params.repetition_penalty
    ending = set(params.stop_token_ids) | (set() if params.ignore_eos else set(EOS))
    bias = dict(params.logit_bias)

    def changed(token: int, value: float) -> float:
        if token in ending and len(output) < params.min_tokens:
            return -np.inf
        if params.allowed_token_ids and token not in {*params.allowed_token_ids, *EOS}:
            return -np.inf
        if any((*output, token)[-len(ids) :] == ids for ids in params.bad_words_token_ids):
            return -np.inf
        if token in seen and penalty != 1:
            value = float32(value / penalty if value > 0 else value * penalty)
        if counts[token]:
            value = float32(value - params.presence_penalty)
            value = float32(value - float32(params.frequency_penalty * counts[token]))
        return float32(value + bias[token]) if token in bias else value

    return [changed(token, value) for token, value in enumerate(logits)]


IDS = st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 3), max_size=30)
SEQUENCES = st.builds(
    sequence,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    IDS,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.1, 1.7, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 0.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7, 0.1, 2.0]),
    min_tokens=st.sampled_from([0, 0, 5, 40]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=4),
    allowed_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
    # Few ids, so that bad words occur in an output.
    bad_words_token_ids=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=5).map(tuple),
)


@settings(max_examples=150)
@given(seqs=st.lists(SEQUENCES, min_size=1, max_size=5), seed=st.integers(0, 100))
def test_equals_brute_force(seqs: list[Sequence], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 5, (len(seqs), VOCAB)).astype(np.float32)
    expected = [reference(row.tolist(), seq) for row, seq in zip(logits, seqs, strict=True)]
    together = steered(logits, seqs)
    assert together.tolist() == expected
    alone = [steered(logits[i : i + 1], [seq])[0] for i, seq in enumerate(seqs)]
    assert np.array_equal(together, np.array(alone))


@pytest.mark.parametrize("penalty", [0.5, 1.1, 3.0])
def test_repetition_equals_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (1, VOCAB)).astype(np.float32)
    seq = sequence([1, 2, 2, 5], [7, 2, 7], repetition_penalty=penalty)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected: torch.Tensor = processor(torch.tensor([seq.token_ids]), torch.from_numpy(logits))
    assert np.array_equal(steered(logits, [seq]), expected.numpy())


@pytest.mark.parametrize("num_output", range(6))
def test_min_tokens_equals_transformers(num_output: int) -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    logits = np.random.default_rng(0).normal(0, 5, (1, VOCAB)).astype(np.float32)
    seq = sequence([1, 2], [7] * num_output, min_tokens=4)
    processor = MinNewTokensLengthLogitsProcessor(2, 4, sorted(EOS))
    expected: torch.Tensor = processor(torch.tensor([seq.token_ids]), torch.from_numpy(logits))
    assert np.array_equal(steered(logits, [seq]), expected.numpy())


@pytest.mark.parametrize("output", [[], [7], [5, 7], [7, 5, 7], [6, 6, 5, 7]])
def test_bad_words_equal_transformers(output: list[int]) -> None:
    from transformers import NoBadWordsLogitsProcessor

    bad = [[4], [7, 8], [5, 7, 10], [6, 5, 7, 11], [7, 5]]
    logits = np.random.default_rng(0).normal(0, 5, (1, VOCAB)).astype(np.float32)
    seq = sequence([1, 2], output, bad_words_token_ids=bad)
    processor = NoBadWordsLogitsProcessor(bad, eos_token_id=None)
    expected: torch.Tensor = processor(torch.tensor([seq.token_ids]), torch.from_numpy(logits))
    assert np.array_equal(steered(logits, [seq]), expected.numpy())


def test_bad_words_do_not_reach_into_the_prompt() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    seqs = [sequence(tokens, output, bad_words_token_ids=((5, 6),)) for tokens, output in (([1, 5], []), ([1], [5]))]
    assert np.argwhere(steered(logits, seqs) != 0).tolist() == [[1, 6]]


def test_biases_equal_transformers() -> None:
    from transformers import SequenceBiasLogitsProcessor

    bias = {4: 2.5, 9: -100.0, 20: 0.1}
    logits = np.random.default_rng(0).normal(0, 5, (1, VOCAB)).astype(np.float32)
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    expected: torch.Tensor = processor(torch.tensor([[1, 2]]), torch.from_numpy(logits))
    assert np.array_equal(steered(logits, [sequence([1], [2], logit_bias=bias)]), expected.numpy())


def test_mask_test_cases_change_streams(engine: LLMEngine) -> None:
    """Without a few of the rules the streams would be others."""
    params = [SamplingParams(temperature=0, max_tokens=40, **fields) for fields in MASKED]
    found = streams(engine, prompts(), params)
    assert all(set(stream) <= {2, *FEW} for stream in (found[1], found[3]))
    pairs = {pair for stream in (found[1], found[3]) for pair in itertools.pairwise(stream)}
    assert len(pairs) > 5
    for name in ("logit_bias", "allowed_token_ids", "bad_words_token_ids"):
        none: dict[str, Any] = {name: ()}
        without = [replace(one, **none) for one in params]
        changed = streams(engine, prompts(), without)
        assert [a != b for a, b in zip(changed, found, strict=True)] == [name in fields for fields in MASKED]


def test_pitfall_6_rows_of_different_length_punish_no_padding() -> None:
    """Seed 004 pads its `prev_ids` with 0, which punishes token 0 in the shorter row; this code pads no row."""
    seqs = [sequence([5], [], repetition_penalty=2.0), sequence([6, 7, 8, 9], [6], repetition_penalty=2.0)]
    changed = steered(np.ones((2, VOCAB), np.float32), seqs)
    assert np.flatnonzero(changed[0] != 1).tolist() == [5]
    assert np.flatnonzero(changed[1] != 1).tolist() == [6, 7, 8, 9]


def test_only_adjusted_rows_are_copied() -> None:
    seqs = [
        sequence([1, 2], [3]),
        sequence([1, 2], [3], presence_penalty=1.0),
        sequence([1, 2], [3], min_tokens=2),
        sequence([1, 2], [3], min_tokens=1),
    ]
    chunk = sequence([1, 2, 3], [], frequency_penalty=1.0)
    batch = ScheduledBatch({seq.id: seq for seq in [*seqs, chunk]}, [3, 3, 3, 3, 2], 0)
    assert batch.is_final[-1] is False
    assert list(batch.histories) == [1, 2]
    assert all(not len(history.prompt_ids) for history in batch.histories.values())
    assert LogitMasks(frozenset()).masked(batch.histories, {}, no_late_tokens, VOCAB) is None
    assert LogitMasks(frozenset()).biased(batch.histories, VOCAB) is None
    assert LogitMasks(frozenset()).allowed(batch.histories, VOCAB) is None
    assert SeenTokens().penalties({}) is None


def test_batch_is_independent_of_later_sequence_changes() -> None:
    """The step's history keeps its state at scheduling."""
    seq = sequence([1, 2], [3], repetition_penalty=2.0)
    history = batch_of([seq]).histories[0]
    seq.append_token(4)
    assert (history.prompt_ids.tolist(), history.output_ids) == ([1, 2], [3])
    assert batch_of([seq]).histories[0].output_ids == [3, 4]


def test_unknown_stop_ids_mask_no_token() -> None:
    seq = sequence([1], [], min_tokens=1, stop_token_ids=(VOCAB, VOCAB + 7))
    assert np.isfinite(np.delete(steered(np.zeros((1, VOCAB), np.float32), [seq])[0], sorted(EOS))).all()


def test_overflowing_penalty_does_not_affect_other_rows() -> None:
    seqs = [sequence([5], [6], repetition_penalty=1e-40), sequence([5], [6], repetition_penalty=1.5)]

    def sampled(rows: list[Sequence]) -> list[int]:
        count = len(rows)
        ones, zeros = np.ones(count, np.float32), np.zeros(count, np.int64)
        params = SampleParams(ones, zeros, ones, 0 * ones)
        logits = np.full((count, VOCAB), 9.0, np.float32)
        found = SeenTokens().penalties(batch_of(rows).histories)
        assert found is not None
        penalize(logits, found)
        ids: list[int] = sample(logits, params, zeros.astype(np.uint64), zeros + 1, zeros).tolist()
        return ids

    first, second = sampled(seqs)
    assert first == 5
    assert sampled(seqs[1:]) == [second]


# Whole streams.


def make_engine(folder: Path, **fields: Any) -> LLMEngine:
    """Blocks for two or three prompts, so that sequences are preempted; 16 tokens a step, so chunks too."""
    config = Config(
        model=str(folder),
        dtype="float32",
        enable_prefix_caching=True,
        num_kvcache_blocks=6,
        max_model_len=96,
        max_num_batched_tokens=16,
        **fields,
    )
    return LLMEngine(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LLMEngine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def prompts() -> list[list[int]]:
    rnd = random.Random(5)
    return [[rnd.randrange(5, 384) for _ in range(n)] for n in (1, 3, 16, 17, 40)]


def transformers_stream(model: Any, prompt: list[int], **options: Any) -> list[int]:
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), do_sample=False, **{"max_new_tokens": NEW_TOKENS, **options})
    stream: list[int] = out[0, len(prompt) :].tolist()
    return stream


def streams(engine: LLMEngine, all_prompts: list[list[int]], params: Any) -> list[list[int]]:
    return [answer["token_ids"] for answer in engine.generate(all_prompts, params, request_ids=IDS_OF_REQUESTS)]


IDS_OF_REQUESTS = [f"r{i}" for i in range(len(prompts()))]


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_greedy_streams_with_repetition_penalty_equal_transformers(
    engine: LLMEngine, model: Any, penalty: float
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, repetition_penalty=penalty)
    found = streams(engine, prompts(), params)
    assert found == [transformers_stream(model, prompt, repetition_penalty=penalty) for prompt in prompts()]
    assert found != streams(engine, prompts(), replace(params, repetition_penalty=1.0))


MIXED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {},
    {"frequency_penalty": -1.0, "min_tokens": 9},
    {"repetition_penalty": 0.9, "presence_penalty": -0.5, "top_p": 0.9, "top_k": 50},
]
# Every id is followed by few others: half of all pairs of six ids are bad, so that masks change with each token.
FEW = (20, 21, 22, 23, 24, 25)
BAD_PAIRS = tuple((a, b) for a in FEW for b in FEW if (a * b) % 3)
MASKED: list[dict[str, Any]] = [
    {"logit_bias": {token: 60.0 - token for token in FEW}, "repetition_penalty": 1.2},
    {"allowed_token_ids": FEW, "bad_words_token_ids": ((20,), *BAD_PAIRS), "ignore_eos": True},
    {},
    {"allowed_token_ids": FEW, "bad_words_token_ids": ((21, 24, 21), *BAD_PAIRS[::2]), "frequency_penalty": 0.5},
    {"logit_bias": {30: -100.0, 31: 60.0}, "bad_words_token_ids": ((31, 31),), "top_p": 0.9, "min_tokens": 9},
]


@pytest.mark.parametrize("steering", [MIXED, MASKED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adjusted_streams_equal_alone_in_batch_and_preemption(
    engine: LLMEngine, temperature: float, steering: list[dict[str, Any]]
) -> None:
    params = [SamplingParams(temperature=temperature, max_tokens=40, **fields) for fields in steering]
    before = engine.core.scheduler.lifecycle.num_preemptions
    together = streams(engine, prompts(), params)
    assert engine.core.scheduler.lifecycle.num_preemptions > before
    for i, (prompt, one) in enumerate(zip(prompts(), params, strict=True)):
        (answer,) = engine.generate([prompt], one, request_ids=IDS_OF_REQUESTS[i : i + 1])
        assert answer["token_ids"] == together[i]


@pytest.mark.parametrize("steering", [MIXED, MASKED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adjusted_streams_equal_with_deferred_output(
    engine: LLMEngine, folder: Path, temperature: float, steering: list[dict[str, Any]]
) -> None:
    """A row that was scheduled before its newest token had come is punished for that token too."""
    params = [SamplingParams(temperature=temperature, max_tokens=40, **fields) for fields in steering]
    deferred = make_engine(folder, deferred_output=True)
    assert streams(deferred, prompts(), params) == streams(engine, prompts(), params)


@pytest.mark.parametrize("fields", [*MIXED, *MASKED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resumed_sequence_keeps_its_penalties(engine: LLMEngine, fields: dict[str, Any], temperature: float) -> None:
    """Rule S5: tokens after `num_prompt_tokens` are output, for penalties and min_tokens as well."""
    params = SamplingParams(temperature=temperature, max_tokens=NEW_TOKENS, **{**fields, "ignore_eos": True})
    prompt = prompts()[3]
    (whole,) = engine.generate([prompt], replace(params, seed=8))
    for have in (1, 8, NEW_TOKENS - 1):
        tokens = [*prompt, *whole["token_ids"][:have]]
        seq = Sequence(tokens, BLOCK, params, num_prompt_tokens=len(prompt), seed=8)
        engine.core.add_request(seq)
        while engine.core.has_unfinished():
            engine.core.step()
        assert seq.completion_token_ids == whole["token_ids"]


def test_adjusted_rows_match_sampled_sequences(engine: LLMEngine) -> None:
    """A chunk in front has no row of logits, so the masked sequence's index in the batch is not its row."""
    runner = engine.core.runner
    assert isinstance(runner, ModelRunner)
    prompt = prompts()[2]
    greedy = SamplingParams(temperature=0)
    (best,) = engine.generate([prompt], replace(greedy, max_tokens=1))[0]["token_ids"]
    masked = replace(greedy, min_tokens=1, stop_token_ids=(best,))
    seqs = [Sequence(tokens, BLOCK, params) for tokens, params in ((prompt * 2, masked), (prompt, masked))]
    for i, seq in enumerate(seqs):
        seq.block_table = [2 * i, 2 * i + 1]
    plain = Sequence(prompt, BLOCK, greedy)
    plain.block_table = [4]
    batch = ScheduledBatch({seq.id: seq for seq in [*seqs, plain]}, [20, 16, 16], 52)
    with runner.scratch_kv_cache(5):
        found = runner.forward(batch).token_ids
    assert list(found) == [seqs[1].id, plain.id]
    assert found[plain.id] == (best,)
    assert found[seqs[1].id] != (best,)


@pytest.fixture(scope="module")
def stopper(model: Any) -> int:
    return transformers_stream(model, prompts()[2])[1]


@pytest.fixture(scope="module")
def stopping(tmp_path_factory: pytest.TempPathFactory, stopper: int) -> LLMEngine:
    """The same weights, with `stopper` as an end-of-sequence id."""
    generation = {"eos_token_id": [2, stopper]}
    return make_engine(make_checkpoint(tmp_path_factory.mktemp("eos"), num_hidden_layers=2, generation=generation))


class TestMinTokens:
    """The second token of a greedy stream is made to end it."""

    def answer(self, engine: LLMEngine, **fields: Any) -> dict[str, Any]:
        params = SamplingParams(temperature=0, **{"max_tokens": NEW_TOKENS, **fields})
        (answer,) = engine.generate([prompts()[2]], params)
        return answer

    @pytest.mark.parametrize("fewest", [0, 1, 2, 3, 7, 16])
    def test_no_eos_before(self, stopping: LLMEngine, model: Any, stopper: int, fewest: int) -> None:
        expected = transformers_stream(model, prompts()[2], min_new_tokens=fewest, eos_token_id=[2, stopper])
        found = self.answer(stopping, min_tokens=fewest)
        assert found["token_ids"] == expected
        assert stopper not in expected[:fewest]
        assert len(expected) >= fewest
        assert (expected[-1] == stopper) == (found["finish_reason"] == f"stop_{stopper}")

    def test_no_stop_token_before(self, engine: LLMEngine, stopping: LLMEngine, stopper: int) -> None:
        """A request's `stop_token_ids` are masked like the model's own, `ignore_eos` or not."""
        for ignore_eos in (False, True):
            fields = {"stop_token_ids": (stopper,), "min_tokens": 7, "ignore_eos": ignore_eos}
            found = self.answer(engine, **fields)
            assert found["token_ids"] == self.answer(stopping, min_tokens=7)["token_ids"]
            assert stopper not in found["token_ids"][:7]
        assert self.answer(engine, stop_token_ids=(stopper,))["token_ids"][-1] == stopper

    def test_ignored_eos_is_an_ordinary_token(self, engine: LLMEngine, stopping: LLMEngine, stopper: int) -> None:
        found = self.answer(stopping, min_tokens=7, ignore_eos=True)
        assert found["token_ids"][1] == stopper
        assert found["token_ids"] == self.answer(engine)["token_ids"]

    def test_max_tokens_ends_answer_below_min_tokens(self, stopping: LLMEngine, stopper: int) -> None:
        found = self.answer(stopping, min_tokens=5, max_tokens=5)
        assert (len(found["token_ids"]), found["finish_reason"]) == (5, "max_tokens")
        assert stopper not in found["token_ids"]


@pytest.mark.parametrize("steering", [MIXED, MASKED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalized_launches_do_not_wait_for_tokens(
    engine: LLMEngine,
    folder: Path,
    temperature: float,
    steering: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Former fault: one penalized row made every launch on a GPU wait for the previous step, for all rows."""
    params = [SamplingParams(temperature=temperature, max_tokens=30, **fields) for fields in steering]
    expected = streams(engine, prompts(), params)
    deferred = make_engine(folder, deferred_output=True)
    runner: Any = deferred.core.runner
    launch, launching, late = runner.launch, [False], [0]

    def watched(batch: ScheduledBatch) -> Any:
        launching[0] = True
        late[0] += sum(batch.from_last_output[i] for i in batch.histories)
        try:
            return launch(batch)
        finally:
            launching[0] = False

    def fetch(ids: torch.Tensor) -> Any:
        def wait() -> list[int]:
            assert not launching[0], "a launch waits for tokens"
            return ids.tolist()

        return wait

    monkeypatch.setattr(runner, "launch", watched)
    monkeypatch.setattr(runner.sampler, "waits_for_tokens", True)
    # PyTorch's kernels apply the penalties: like a GPU's they accept late tokens.
    monkeypatch.setattr(runner.kernels.sampling, "fetch", fetch)
    assert streams(deferred, prompts(), params) == expected
    assert late[0] > 50


def test_kept_penalty_counts_equal_recount() -> None:
    """Sequences that come and go, are interrupted, or come back with another list of tokens."""
    rnd, kept = random.Random(3), SeenTokens()
    seqs = [sequence([rnd.randrange(VOCAB) for _ in range(5)], [], repetition_penalty=1.2) for _ in range(6)]
    for _ in range(200):
        chosen = {row: seqs[i] for row, i in enumerate(rnd.sample(range(6), rnd.randint(1, 6)))}
        histories = {row: TokenHistory.of(seq) for row, seq in chosen.items()}
        for row in list(histories):
            if rnd.random() < 0.3:
                histories[row] = histories[row].with_token(rnd.randrange(VOCAB))
        found, anew = kept.penalties(histories), SeenTokens().penalties(histories)
        assert found is not None
        assert anew is not None
        counts, expected = (
            [dict(zip(seen.ids, seen.output_counts, strict=True)) for seen in one.seen] for one in (found, anew)
        )
        assert counts == expected
        for row, seq in chosen.items():
            late = histories[row].late
            for token in [late] if late >= 0 else [rnd.randrange(VOCAB) for _ in range(rnd.randint(0, 3))]:
                seq.append_token(token)
            if rnd.random() < 0.05:
                seq.token_ids = list(seq.token_ids)


def test_histories_of_ended_sequences_are_dropped() -> None:
    """Neither where penalties are counted, nor in what ranks are sent."""
    kept = SeenTokens()
    for _ in range(3000):
        kept.penalties({0: TokenHistory.of(sequence([1, 2], [3], presence_penalty=1.0))})
    assert len(kept._known) <= 600
