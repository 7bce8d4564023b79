"""Several ranks compute the same as one: logits and greedy streams, for every architecture and odd shapes.

The ranks are threads here, with real connections (socket pairs) between them; tests/chaos has the processes.
An architecture joins by a line in SHAPES.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import xxhash

from common.config import Config, ParallelConfig
from common.params.sampling_params import SamplingParams
from kernels.select import select_backend
from tests.checkpoints import MIN_VOCAB_SIZE, make_checkpoint
from tests.covering import slow_but
from tests.meshes import local_meshes
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import BlockCopy, ScheduledBatch, ScheduledBatchOutput
from worker.engine.sequence import Sequence
from worker.model.kv_digests import KvDigester
from worker.model.layers import moe
from worker.model.model_runner import ModelRunner
from worker.model.sharding import Alone, Collectives, DataParallel, Shard
from worker.ranks.collectives import GroupCollectives

pytestmark = pytest.mark.each_value

BLOCK_SIZE = 16
POOL = 96
NEW_TOKENS = 24
R = TypeVar("R")


@dataclass(frozen=True)
class Shape:
    """A checkpoint, and how many ranks share it."""

    ranks: int
    checkpoint: dict[str, Any]
    expert_parallel: bool = False


# Head counts and widths are divisible by the ranks; key/value heads may be fewer, vocabularies may be odd.
SHAPES = {
    "qwen3-tied": Shape(2, {"architecture": "qwen3"}),
    "qwen3-one-kv-head-odd-vocab": Shape(
        2, {"architecture": "qwen3", "num_key_value_heads": 1, "vocab_size": MIN_VOCAB_SIZE + 40, "head_dim": 64}
    ),
    "qwen3-untied-biases-3": Shape(
        3,
        {
            "architecture": "qwen3",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 162,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "llama-biases": Shape(
        2, {"architecture": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    ),
    "qwen3-moe": Shape(2, {"architecture": "qwen3_moe", "decoder_sparse_step": 2}),
    "qwen3-moe-experts": Shape(2, {"architecture": "qwen3_moe"}, expert_parallel=True),
    "mixtral-experts-3": Shape(
        3,
        {
            "architecture": "mixtral",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 162,
            "sliding_window": 30,
        },
        expert_parallel=True,
    ),
    "glm4-moe-experts": Shape(2, {"architecture": "glm4_moe", "attention_bias": True}, expert_parallel=True),
    "gpt-oss": Shape(2, {"architecture": "gpt_oss"}),
    "gpt-oss-experts": Shape(2, {"architecture": "gpt_oss"}, expert_parallel=True),
    "deepseek-v3": Shape(2, {"architecture": "deepseek_v3"}),
    "deepseek-v3-experts": Shape(2, {"architecture": "deepseek_v3", "n_routed_experts": 12}, expert_parallel=True),
    "deepseek-v32-experts": Shape(2, {"architecture": "deepseek_v32"}, expert_parallel=True),
    "llama-two-kv-heads-on-4": Shape(4, {"architecture": "llama", "head_dim": 20, "vocab_size": MIN_VOCAB_SIZE + 41}),
}


class Ranks:
    """A model on several ranks, each a thread of this process; 1 is a model without collectives."""

    def __init__(self, folder: Path, size: int, **config: Any) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        # The ranks share this process's instruction set: it is chosen before any of them asks for it.
        self._kernels = select_backend()
        meshes = local_meshes(size)
        made = Config(
            model=str(folder),
            kv_cache_block_size=BLOCK_SIZE,
            max_model_len=1024,
            tensor_parallel_size=size,
            **{"dtype": "float32", **config},
        )

        def load(rank: int) -> ModelRunner:
            if size == 1:
                shard = Shard()
            else:
                collectives = GroupCollectives(meshes[rank], "127.0.0.1")
                shard = Shard(rank, size, collectives, made.enable_expert_parallel)
            runner = ModelRunner(made, ModelConfig.from_folder(folder), shard=shard)
            runner.allocate_kv_cache(POOL)
            return runner

        self.runners = self.all(load)

    def all(self, work: Callable[[int], R]) -> list[R]:
        """Runs something on every rank at the same time."""
        return list(self._pool.map(work, range(self.size)))

    def logits(self, batch: ScheduledBatch) -> torch.Tensor:
        """float32 [F, V] of the final rows, which have equal bits on all ranks."""
        found = self.all(lambda rank: self.runners[rank].run_model(self.runners[rank].prepare_model(batch)))
        assert all(torch.equal(found[0], other) for other in found)
        return found[0]

    def streams(self, prompts: list[list[int]]) -> list[list[int]]:
        """NEW_TOKENS greedy tokens of each prompt, all in one batch, the first half of each prompt in a chunk."""
        params = SamplingParams(temperature=0.0)
        seqs = [Sequence(prompt, BLOCK_SIZE, params) for prompt in prompts]
        free = list(range(POOL))
        for seq in seqs:
            seq.block_table = [free.pop() for _ in range(-(-(seq.num_tokens + NEW_TOKENS) // BLOCK_SIZE))]
        self._step({seq: max(1, seq.num_tokens // 2) for seq in seqs})
        for _ in range(NEW_TOKENS):
            self._step({s: s.num_tokens - s.num_computed_tokens for s in seqs if s.num_completion_tokens < NEW_TOKENS})
        return [seq.completion_token_ids for seq in seqs]

    def outputs(self, batch: ScheduledBatch) -> list[ScheduledBatchOutput]:
        """What each rank puts out."""
        return self.all(lambda rank: self.runners[rank].forward(batch))

    def close(self) -> None:
        self._pool.shutdown()

    def _step(self, scheduled: dict[Sequence, int]) -> None:
        counts = list(scheduled.values())
        batch = ScheduledBatch({seq.id: seq for seq in scheduled}, counts, sum(counts))
        outputs = self.outputs(batch)
        assert all(output.token_ids == outputs[0].token_ids for output in outputs)
        for seq, count in scheduled.items():
            seq.num_computed_tokens += count
            for token in outputs[0].token_ids.get(seq.id, ()):
                seq.append_token(token)


# One of each way to share a model out.
KEPT = {"qwen3-tied", "qwen3-moe-experts", "gpt-oss", "deepseek-v3-experts", "llama-two-kv-heads-on-4"}


@pytest.fixture(scope="module", params=slow_but(KEPT, list(SHAPES)))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Ranks]]:
    """The model on one rank and on several."""
    shape = SHAPES[request.param]
    folder = make_checkpoint(tmp_path_factory.mktemp(request.param), **shape.checkpoint)
    made = Ranks(folder, 1), Ranks(folder, shape.ranks, enable_expert_parallel=shape.expert_parallel)
    yield made
    for each in made:
        each.close()


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    rnd = random.Random(seed)
    return [[rnd.randrange(5, MIN_VOCAB_SIZE) for _ in range(n)] for n in lengths]


def one(tokens: list[int], start: int) -> ScheduledBatch:
    """A step that computes the tokens from `start` on."""
    seq = Sequence(tokens, BLOCK_SIZE)
    seq.block_table = list(range(-(-len(tokens) // BLOCK_SIZE)))
    seq.num_computed_tokens = start
    return ScheduledBatch({seq.id: seq}, [len(tokens) - start], len(tokens) - start)


def test_logits(both: tuple[Ranks, Ranks]) -> None:
    (prompt,) = random_prompts([150], 1)
    for start, end in ((0, 37), (37, 100), (100, 149), (149, 150)):
        expected, found = (ranks.logits(one(prompt[:end], start)) for ranks in both)
        assert found.shape == expected.shape
        known = expected > -torch.inf
        error = (found - expected)[known].abs().max() / expected[known].abs().max()
        assert error < 1e-4, f"relative error {error:.1e}"


def test_answering_rank_digests_shared_logits(both: tuple[Ranks, Ranks]) -> None:
    (prompt,) = random_prompts([40], 4)
    seq = Sequence(prompt, BLOCK_SIZE, SamplingParams(temperature=0.0), num_prompt_tokens=38, logits_every=2)
    seq.block_table = [0, 1, 2]
    batch = ScheduledBatch({seq.id: seq}, [40], 40)
    for ranks in both:
        (row,) = ranks.logits(batch)
        outputs = ranks.outputs(batch)
        assert outputs[0].logit_digests == {seq.id: {40: xxhash.xxh3_64_intdigest(row.numpy().tobytes())}}
        assert all(output.logit_digests is None for output in outputs[1:])


def test_answering_rank_digests_kv_of_all_ranks(both: tuple[Ranks, Ranks]) -> None:
    for ranks in both:
        ranks.streams(random_prompts([40, 70], seed=4))
        parts = []
        for runner in ranks.runners:
            alone = KvDigester(runner.kernels, Shard())
            parts.append(
                [int(alone._of_block(runner.kernels.kv_cache.contents(runner._kv_cache, i))) for i in (91, 95)]
            )
        batch = one([5, 6, 7], 0)
        batch.digested_blocks = {91: b"a", 95: b"b"}
        first, *others = [output.kv_digests for output in ranks.outputs(batch)]
        wanted = [xxhash.xxh3_64_intdigest(struct.pack(f"<{ranks.size}q", *each)) for each in zip(*parts, strict=True)]
        assert first == tuple(zip((b"a", b"b"), wanted, strict=True))
        assert wanted[0] != wanted[1]
        assert others == [None] * (ranks.size - 1)


def test_failed_kv_digests_on_one_rank_delay_no_rank(
    both: tuple[Ranks, Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is; the step has its tokens, and the next one digests again."""
    (ranks, expected), prompt = (both[1], both[0].outputs(one([5, 6, 7], 0))), [5, 6, 7]

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    for runner in ranks.runners:
        with monkeypatch.context() as patch:
            patch.setattr(runner.kernels.kv_cache, "contents", fail)
            batch = one(prompt, 0)
            batch.digested_blocks = {91: b"a", 95: b"b"}
            outputs = ranks.outputs(batch)
        assert [list(each.token_ids.values()) for each in outputs] == [
            list(expected[0].token_ids.values())
        ] * ranks.size
        assert [each.kv_digests for each in outputs] == [()] + [None] * (ranks.size - 1)
    batch = one(prompt, 0)
    batch.digested_blocks = {91: b"a"}
    assert len(ranks.outputs(batch)[0].kv_digests or ()) == 1


def test_copied_block_equals_its_source(both: tuple[Ranks, Ranks]) -> None:
    """Each rank copies its part of a block: 40 tokens are two full blocks and a part of one."""
    (prompt,) = random_prompts([40], 5)
    for ranks in both:
        batch = one(prompt, 0)
        blocks = batch.tables[0]
        (whole,) = ranks.outputs(batch)[0].token_ids.values()
        (row,) = ranks.logits(batch)
        last = one(prompt, 39)
        last.tables[0][:] = [*blocks[:2], 90]
        last.block_copies = [BlockCopy(blocks[2], 90)]
        (copied,) = ranks.outputs(last)[0].token_ids.values()
        assert copied == whole
        assert torch.equal(ranks.logits(last)[0], row)


def test_greedy_streams(both: tuple[Ranks, Ranks]) -> None:
    prompts = random_prompts([1, 15, 16, 17, 64, 200], 2)
    expected, found = (ranks.streams(prompts) for ranks in both)
    assert found == expected
    assert len({tuple(stream) for stream in found}) == len(prompts)


def test_step_without_final_row_gives_no_token(both: tuple[Ranks, Ranks]) -> None:
    """A chunk of a greedy prompt, alone in its step."""
    (prompt,) = random_prompts([40], 6)
    seq = Sequence(prompt, BLOCK_SIZE, SamplingParams(temperature=0.0))
    seq.block_table = [0, 1, 2]
    for ranks in both:
        assert [output.token_ids for output in ranks.outputs(ScheduledBatch({seq.id: seq}, [20], 20))] == [
            {}
        ] * ranks.size


def test_row_bits_are_independent_of_batch(both: tuple[Ranks, Ranks]) -> None:
    """With ranks too: sums add in rank order, and padding rows have no effect."""
    _, ranks = both
    prompts = random_prompts([33, 5, 120], 3)
    alone = ranks.logits(one(prompts[0], 0))[0]
    seqs = [Sequence(prompt, BLOCK_SIZE) for prompt in (prompts[1], prompts[0], prompts[2])]
    for i, seq in enumerate(seqs):
        seq.block_table = list(range(10 * i + 10, 10 * i + 20))
    counts = [seq.num_tokens for seq in seqs]
    together = ranks.logits(ScheduledBatch({seq.id: seq for seq in seqs}, counts, sum(counts)))
    assert torch.equal(together[1], alone)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_lockstep_tokens_equal_single_engine(tmp_path: Path, tp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of different sizes, in pieces, and dummy steps: a row's tokens are independent of the other engine."""
    monkeypatch.setattr(moe, "_MAX_GATHERED_ROWS", 48)
    folder = make_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2)
    prompts = random_prompts([130, 5, 40], 5)
    alone = Ranks(folder, 1)
    expected = alone.streams(prompts)
    alone.close()
    engines = Engines(folder, tp_size)
    assert engines.streams([prompts[:1], prompts[1:]]) == [expected[:1], expected[1:]]
    assert engines.streams([[], prompts]) == [[], expected]
    assert engines.streams([prompts, []]) == [expected, []]


class Engines:
    """Two engines in lockstep, each of `tp_size` ranks; all ranks are threads."""

    def __init__(self, folder: Path, tp_size: int) -> None:
        self._tp_size = tp_size
        self._pool = ThreadPoolExecutor(2 * tp_size)
        config = Config(
            model=str(folder),
            dtype="float32",
            kv_cache_block_size=BLOCK_SIZE,
            max_model_len=1024,
            tensor_parallel_size=tp_size,
            enable_expert_parallel=True,
            parallel_config=ParallelConfig(2),
        )
        everyone = local_meshes(2 * tp_size)

        def load(place: int) -> ModelRunner:
            engine, rank = divmod(place, tp_size)

            def group(members: range) -> Collectives:
                mesh = everyone[place].part(members)
                return GroupCollectives(mesh, "127.0.0.1") if len(members) > 1 else Alone()

            data = DataParallel(engine, 2, group(range(rank, 2 * tp_size, tp_size)), group(range(2 * tp_size)))
            shard = Shard(rank, tp_size, group(range(engine * tp_size, (engine + 1) * tp_size)), True, data)
            runner = ModelRunner(config, ModelConfig.from_folder(folder), shard=shard)
            runner.allocate_kv_cache(POOL)
            return runner

        self._runners = list(self._pool.map(load, range(2 * tp_size)))

    def streams(self, prompts: list[list[list[int]]]) -> list[list[list[int]]]:
        """NEW_TOKENS greedy tokens of each engine's prompts."""
        seqs = [[Sequence(each, BLOCK_SIZE, SamplingParams(temperature=0.0)) for each in own] for own in prompts]
        for own in seqs:
            for i, seq in enumerate(own):
                seq.block_table = list(range(20 * i, 20 * i + 20))
        for _ in range(NEW_TOKENS):
            self._step(seqs)
        return [[seq.completion_token_ids for seq in own] for own in seqs]

    def _step(self, seqs: list[list[Sequence]]) -> None:
        batches = [self._batch(own) for own in seqs]
        forward = [runner.forward for runner in self._runners]
        outputs = list(
            self._pool.map(lambda place: forward[place](batches[place // self._tp_size]), range(len(forward)))
        )
        for own, output in zip(seqs, outputs[:: self._tp_size], strict=True):
            for seq in own:
                seq.num_computed_tokens = seq.num_tokens
                seq.append_token(output.token_ids[seq.id][0])

    def _batch(self, own: list[Sequence]) -> ScheduledBatch:
        counts = [seq.num_tokens - seq.num_computed_tokens for seq in own]
        return ScheduledBatch({seq.id: seq for seq in own}, counts, sum(counts), is_dummy_run=not own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_order_is_fixed(dtype: torch.dtype) -> None:
    """gloo's own all_reduce gives a row several bit patterns with 3 ranks, depending on the number of rows."""
    size, rows = 3, 300
    meshes = local_meshes(size)
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(rows, 50, generator=generator).to(dtype) for _ in range(size)]
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)

    def reduce(rank: int) -> list[torch.Tensor]:
        group = GroupCollectives(meshes[rank], "127.0.0.1")
        return [group.all_reduce(parts[rank][:count]) for count in (1, 2, 7, 16, rows)]

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(reduce, range(size)):
            assert all(torch.equal(part, expected[: len(part)]) for part in found)


def test_expert_parallel_without_experts_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    config = Config(model=str(folder), tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ModelError, match="enable_expert_parallel: Qwen3ForCausalLM has no experts"):
        ModelRunner(config, ModelConfig.from_folder(folder), shard=Shard(0, 2))


def test_indivisible_heads_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3", num_attention_heads=6, num_key_value_heads=2, head_dim=16)
    for size, name in ((4, "num_attention_heads"), (3, "num_key_value_heads")):
        config = Config(model=str(folder), tensor_parallel_size=size)
        with pytest.raises(ModelError, match=name):
            ModelRunner(config, ModelConfig.from_folder(folder), shard=Shard(0, size))
