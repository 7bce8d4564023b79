"""All drafts of a step in one native call equal the plain chain, and so do the caches, to the bit."""

from __future__ import annotations

import functools
import random
from ctypes import CDLL
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config, SpeculativeConfig
from common.params.config_parts import EAGLE3
from common.params.sampling_params import SamplingParams
from kernels.no_token import NO_TOKEN
from tests.checkpoints import make_checkpoint, make_eagle3_head
from tests.parity.draws import changes_of_logits
from tests.unit.mutants import Mutant
from worker.config.model_config import ModelConfig
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner
from worker.model.speculation.draft_chains import DraftChains
from worker.model.speculation.draft_proposer import SampledStep
from worker.model.speculation.draft_runner import ChainRows
from worker.model.speculation.model_proposers import EagleProposer, ModelProposer

NUM_IDS, NUM_SLOTS, MOST, MAX_LENGTH = 384, 1024, 6, 200


@dataclass(frozen=True)
class Kind:
    """A target and its head: entries of their config.json, and how they are served."""

    target: dict[str, Any]
    head: dict[str, Any]
    served: dict[str, Any]
    block_size: int = 16


KINDS = {
    "some ids": Kind({}, {}, {"dtype": "float32"}, block_size=1),
    "all ids": Kind({"hidden_size": 40}, {"draft_vocab_size": NUM_IDS, "num_key_value_heads": 3}, {"dtype": "float32"}),
    "bfloat16": Kind(
        {"head_dim": 32}, {"draft_vocab_size": NUM_IDS, "norm_before_residual": True}, {"dtype": "bfloat16"}
    ),
    "rows of embeddings": Kind(
        {"tie_word_embeddings": False, "hidden_size": 96},
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        block_size=1,
    ),
    "int8": Kind({}, {"draft_vocab_size": NUM_IDS}, {"dtype": "bfloat16", "quantize": "int8"}),
}


@functools.cache
def loaded(name: str, folder: Path) -> ModelRunner:
    """A model that drafts; once for all tests."""
    kind = KINDS[name]
    target = make_checkpoint(folder / "target", tokenizer=False, **kind.target)
    head = make_eagle3_head(folder / "head", target, **kind.head)
    spec = SpeculativeConfig(MOST, EAGLE3, str(head), adaptive=False)
    config = Config(model=str(target), kernels="cpu", kv_cache_block_size=kind.block_size, max_model_len=MAX_LENGTH,
                    speculative_config=spec, **kind.served)  # fmt: skip
    return ModelRunner(config, ModelConfig.from_folder(target))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


def sequence(rnd: random.Random, block_size: int, blocks: list[int], *, greedy: bool, steered: bool) -> Sequence:
    """A sequence with its own blocks, and room for some drafts after it."""
    length = rnd.randint(2, 30)
    given: dict[str, Any] = {} if greedy else {"temperature": rnd.choice([0.0, 0.3, 1.0, 2.0])}
    if rnd.random() < 0.5:
        given |= {"top_k": rnd.randint(1, 40), "top_p": rnd.uniform(0.3, 1.0), "min_p": rnd.uniform(0.0, 0.1)}
    if steered:
        given |= changes_of_logits(rnd, 0.5, NUM_IDS) | {"presence_penalty": 0.5}
    tokens = [rnd.randrange(NUM_IDS) for _ in range(length)]
    seq = Sequence(tokens, block_size, SamplingParams(**given), seed=rnd.randrange(2**64), choice=rnd.randrange(3))
    count = -(-(length + rnd.randint(1, MOST)) // block_size)
    seq.block_table = [blocks.pop() for _ in range(count)]
    return seq


def sampled(runner: ModelRunner, rnd: random.Random, *, greedy: bool, steered: float) -> SampledStep:
    """A step of decodes with and without drafts, chunks and whole prompts, over random states."""
    block_size, seqs, lengths = runner.config.kv_cache_block_size, dict[int, Sequence](), list[int]()
    drafts, tokens = dict[int, list[int]](), dict[int, tuple[int, ...]]()
    blocks = rnd.sample(range(NUM_SLOTS // block_size), NUM_SLOTS // block_size)
    for _ in range(rnd.randint(1, 5)):
        seq = sequence(rnd, block_size, blocks, greedy=greedy, steered=rnd.random() < steered)
        own = [rnd.randrange(NUM_IDS) for _ in range(rnd.randint(0, 4))]
        count = min(rnd.choice([1, 1, 3, 40]), seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens - count
        if rnd.random() < 0.2 and count > 1:
            # A chunk, whose last token is not reached.
            count -= 1
        else:
            right = rnd.randint(0, len(own))
            newest = NO_TOKEN if rnd.random() < 0.1 else rnd.randrange(NUM_IDS)
            tokens[seq.id] = (*own[:right], newest)
            drafts[seq.id] = own
            count += len(own)
        seq.block_table += [blocks.pop() for _ in range(-(-(seq.num_tokens + len(own)) // block_size))]
        seqs[seq.id] = seq
        lengths.append(count)
    batch = ScheduledBatch(seqs, lengths, sum(lengths), num_spec_step=4, scheduled_spec_decode_tokens=drafts)
    batch.feeds_draft_model = True
    batch.want_drafts({seq_id: rnd.randint(0, MOST) for seq_id in seqs})
    batch.next_token_ids = {seq_id: rnd.randrange(NUM_IDS) for seq_id in seqs}
    hidden = runner.model_config.hidden_size
    generator = torch.Generator().manual_seed(rnd.randrange(2**32))
    states = torch.randn(sum(lengths), 4 * hidden, generator=generator).to(runner.dtype)
    return SampledStep(batch, tokens, np.array(batch.known_token_ids, np.int64), states, {})


def allocated(runner: ModelRunner) -> Any:
    """A cache for the head."""
    assert runner.draft_proposer is not None
    spec, block_size = runner.draft_proposer.kv_spec, runner.config.kv_cache_block_size
    return runner.kernels.kv_cache.allocate(spec, 1, NUM_SLOTS // block_size, block_size, runner.kv_dtype)


def compare(runner: ModelRunner, rnd: random.Random, *, greedy: bool, steered: float = 0.0) -> list[list[int]]:
    """The drafts of a step, by both ways."""
    proposer = runner.draft_proposer
    assert isinstance(proposer, EagleProposer)
    step = sampled(runner, rnd, greedy=greedy, steered=steered)
    one, other = allocated(runner), allocated(runner)
    one.data[:] = torch.randn(one.data.shape, generator=torch.Generator().manual_seed(1)).to(runner.kv_dtype)
    other.data[:] = one.data
    with torch.inference_mode():
        drafts = proposer.propose(replace(step, kv_cache_data=proposer.kv_cache_data(one)))
        expected = ModelProposer.propose(proposer, replace(step, kv_cache_data=proposer.kv_cache_data(other)))
    assert drafts == expected
    assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
    return list(drafts.values())


def check(name: str, folder: Path, rnd: random.Random, rounds: int) -> None:
    runner = loaded(name, folder / name)
    made = [
        drafts
        for _ in range(rounds)
        for greedy, steered in ((True, 0.0), (False, 0.0), (False, 0.5))
        for drafts in compare(runner, rnd, greedy=greedy, steered=steered)
    ]
    assert {len(drafts) for drafts in made} > {1, 3, MOST}
    assert len({tuple(drafts) for drafts in made}) > rounds


@pytest.mark.parametrize("name", KINDS)
def test_native_drafts_equal_plain_chain(native: CDLL, name: str, folder: Path) -> None:
    check(name, folder, random.Random(name), 12)


@pytest.mark.parametrize("name", ["some ids", "bfloat16"])
def test_drafts_equal_on_each_instruction_set(each_attention: CDLL, name: str, folder: Path) -> None:
    check(name, folder, random.Random(5), 4)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", KINDS)
def test_many_steps(native: CDLL, name: str, seed: int, folder: Path) -> None:
    check(name, folder, random.Random(seed), 50)


def test_drafts_equal_with_several_threads(threads: CDLL, folder: Path) -> None:
    runner = loaded("bfloat16", folder / "bfloat16")
    for count in (1, 3):
        threads.fissile_set_threads(count)
        made = [compare(runner, random.Random(3), greedy=False) for _ in range(2)]
        assert made[0] == made[1]


MUTANTS = [
    Mutant("states of other sequences", ModelProposer, "_chain", "torch.from_numpy(order)", "torch.arange(len(own))"),
    Mutant("all at one position", ChainRows, "of", "ends + places", "ends"),
    Mutant("no changes of logits", EagleProposer, "propose", "if i in steered})", "if False})"),
    Mutant("a row too few", DraftChains, "run", "    step.counts,", "    np.maximum(step.counts - 1, 1),"),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(native: CDLL, mutant: Mutant, folder: Path) -> None:
    with mutant.applied(), pytest.raises(AssertionError):
        check("some ids", folder, random.Random(2), 12)


def test_drafts_end_at_last_position(native: CDLL, folder: Path) -> None:
    runner = loaded("some ids", folder / "some ids")
    proposer: Any = runner.draft_proposer
    for length in range(MAX_LENGTH - MOST, MAX_LENGTH + 1):
        seq = Sequence([7] * length, 1)
        seq.block_table, seq.num_computed_tokens = list(range(length + MOST)), length - 1
        batch = ScheduledBatch({seq.id: seq}, [1], 1)
        batch.want_drafts({seq.id: MOST})
        states = torch.randn(1, 4 * runner.model_config.hidden_size)
        cache = allocated(runner)
        step = SampledStep(batch, {seq.id: (9,)}, np.array([7]), states, proposer.kv_cache_data(cache))
        # Each draft after the first one takes a row.
        assert len(proposer.propose(step)[seq.id]) == min(MOST, 1 + MAX_LENGTH - length)
