"""Captured steps compute the same as eager steps: every choice by a step's size is checked.

A step's size reaches a kernel's bits only through these choices and grids: sizes are arguments that no kernel is
specialised for. test_attention.py, test_latent.py and test_linear.py show that key tiles and splits give the same bits
whether or not programs share them, and test_model.py has a whole captured model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.config import Config
from kernels.interface import KVSpec
from kernels.triton_backend import experts, latent
from kernels.triton_backend.attention import WHOLE, tiles_of
from kernels.triton_backend.backend import TritonBackend
from kernels.triton_backend.kv_cache import DeviceKVCache
from kernels.triton_backend.plan import Shape
from kernels.triton_backend.target import TARGETS, Settings
from kernels.triton_backend.tiles import Operands, cut
from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig
from worker.model.decode_graphs import DEFAULT_SIZES, capture_sizes
from worker.model.model_runner import ModelRunner
from worker.model.numerics import captured_facts, numerics_digest

MAX_LEN = 163_840
BLOCK_SIZE = 64
BF16 = torch.bfloat16
# Columns and K: of projections that have parts and of ones that have none, of a head, of DeepSeek's.
WEIGHTS = [(6144, 4096), (4096, 12_288), (256, 2048), (151_936, 1024), (576, 7168)]
OPERANDS: list[Operands] = ["half", "single", "widened", "eight"]


def pairs() -> Iterator[tuple[Shape, Shape]]:
    """Decodes of 1 to 512 sequences, with and without drafts, some of them short and some long, each with the captured
    step that it runs as."""
    for count in range(1, 513):
        seqs = DEFAULT_SIZES[bisect_left(DEFAULT_SIZES, count)]
        longest = (5, 700, 2047, 9000, MAX_LEN)[count % 5]
        own = Shape(count, count, -(-longest // BLOCK_SIZE), 1, longest)
        yield own, Shape(seqs, seqs, -(-MAX_LEN // BLOCK_SIZE), 1, MAX_LEN)
        # Some of them with drafts, and up to `drafts` of each.
        drafts = (1, 3, 8)[count % 3]
        if seqs * (1 + drafts) <= 512:
            verifying = replace(own, rows=count + drafts * (1 + count // 2), max_seqlen_q=1 + drafts)
            yield verifying, Shape(seqs * (1 + drafts), seqs, -(-MAX_LEN // BLOCK_SIZE), 1 + drafts, MAX_LEN)


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
def test_products_of_captured_steps(target: str) -> None:
    settings = Settings(TARGETS[target])
    for own, captured in pairs():
        for columns, inner in WEIGHTS:
            for operands in OPERANDS:
                found, expected = (cut(settings, operands, shape.rows, columns, inner) for shape in (captured, own))
                assert replace(found, split=expected.split) == expected
        for sizes in ((4, 4, False), (4, 1, False), (4, 1, True), (2, 2, False), (2, 1, True), (1, 1, False)):
            of_experts = {experts.tiles_for(settings, 8 * shape.rows, 128, *sizes) for shape in (captured, own)}
            assert len(of_experts) == 1


@pytest.mark.parametrize("target", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("reach", [WHOLE, 128])
def test_attention_of_captured_steps(target: str, reach: int) -> None:
    settings = Settings(TARGETS[target])
    cache = DeviceKVCache(torch.empty(1, 2, 1, BLOCK_SIZE, 8, 128, dtype=BF16, device="meta"), 128)
    latents = DeviceKVCache.allocate(KVSpec(1, 576, 512), 1, 1, BLOCK_SIZE, BF16, torch.device("meta"))
    for own, captured in pairs():
        found, expected = (
            tiles_of(torch.empty(shape.rows, 32, 128, dtype=BF16, device="meta"), cache, shape, reach, settings)
            for shape in (captured, own)
        )
        assert replace(found, dealt=expected.dealt) == expected
        of_latent, expected_of_latent = (
            latent._tiles(torch.empty(shape.rows, 128, 576, dtype=BF16, device="meta"), latents, shape, settings)
            for shape in (captured, own)
        )
        assert of_latent == expected_of_latent


def test_tuned_parts_depend_on_captured_step_size() -> None:
    """Shows that the captured size must be part of the numerics class."""
    settings = Settings(TARGETS["sm_90"], batch_invariant=False)
    parts = [tuple(cut(settings, "half", shape.rows, 1024, 4096).parts for shape in pair) for pair in pairs()]
    assert any(own != captured for own, captured in parts)


@pytest.mark.slow
def test_numerics_class_includes_captured_sizes(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The class of tuned kernels covers the captured sizes, and a smaller pool's size; the batch-invariant class does
    not."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)
    tuned = Config(
        model=str(folder),
        dtype="float32",
        kernels="triton",
        kv_cache_block_size=1,
        max_model_len=4,
        max_num_seqs=4,
        batch_invariant=False,
    )
    configs = [tuned, replace(tuned, enforce_eager=True), replace(tuned, max_num_seqs=2)]
    runners = [ModelRunner(each, ModelConfig.from_folder(each.model)) for each in configs]
    for runner in runners:
        runner.allocate_kv_cache(6)
    assert [captured_facts(runner) for runner in runners] == [(4, 1, 2, 4), (), (4, 1, 2)]
    assert [size.num_rows for size in capture_sizes(tuned)] == [1, 2, 4]
    digest = numerics_digest(runners[0])
    runners[0].allocate_kv_cache(2)
    assert captured_facts(runners[0]) == (2, 1, 2, 4)
    assert numerics_digest(runners[0]) != digest
    runners[0].kernels = TritonBackend(batch_invariant=True)
    assert captured_facts(runners[0]) == ()
