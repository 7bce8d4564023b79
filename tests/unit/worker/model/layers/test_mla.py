"""Latent attention in the absorbed form against the naive one, which projects keys and values up, in float64."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.config import Config
from kernels.interface import IndexSpec
from kernels.torch_backend.backend import TorchBackend
from tests.unit.kernels.steps import Rows, metadata
from worker.config.model_config import ModelConfig, ModelError
from worker.model.forward_context import (
    Context,
    KVCacheTensor,
    reset_forward_context,
    set_forward_context,
    set_kv_cache_data,
)
from worker.model.layers.build import Build
from worker.model.layers.mla import MLAConfig, MLAttention, softmax_scale
from worker.model.layers.rotary import RotaryEmbedding, inverse_frequencies
from worker.weights.checkpoint import load_weights

PREFIX = "model.layers.0.self_attn"
TOKENS, HIDDEN, HEADS = 90, 36, 3
BLOCKS = [4, 0, 3, 5, 1, 2]
BASE: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": 6,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 8,
    "q_lora_rank": 19,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
    "index_n_heads": 24,
    "index_head_dim": 10,
    "index_topk": 20,
    "max_position_embeddings": 512,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


@dataclass
class Naive:
    """The formulas of the papers in float64, one position at a time."""

    config: ModelConfig
    mla: MLAConfig
    weights: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        self.frequencies = inverse_frequencies(self.config.rope, self.mla.qk_rope_head_dim).double()

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weights[f"{name}.weight"].double().t()
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias.double()

    def normed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weights[f"{name}.weight"].double()

    def turned(self, x: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """[..., T, P], each pair as a complex number turned by its position."""
        half = x.shape[-1] // 2
        pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        angles = torch.outer(torch.arange(x.shape[-2]).double(), self.frequencies)
        turned = torch.complex(*pairs) * torch.polar(torch.full_like(angles, self.config.rope.attention_factor), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mla = self.mla
        low = x if mla.q_lora_rank is None else self.normed("q_a_layernorm", self.project("q_a_proj", x))
        q = self.project("q_proj" if mla.q_lora_rank is None else "q_b_proj", low).view(len(x), HEADS, -1)
        compressed = self.project("kv_a_proj_with_mqa", x)
        latent = self.normed("kv_a_layernorm", compressed[:, : mla.kv_lora_rank])
        shared_key = self.turned(compressed[:, mla.kv_lora_rank :], mla.interleaved)
        expanded = self.project("kv_b_proj", latent).view(len(x), HEADS, -1)
        allowed = self.allowed(x, low)
        outs = []
        for head in range(HEADS):
            plain = q[:, head, : mla.qk_nope_head_dim] @ expanded[:, head, : mla.qk_nope_head_dim].t()
            rotated = self.turned(q[:, head, mla.qk_nope_head_dim :], mla.interleaved) @ shared_key.t()
            scores = ((plain + rotated) * self.scale()).masked_fill(~allowed, -math.inf)
            outs.append(scores.softmax(-1) @ expanded[:, head, mla.qk_nope_head_dim :])
        return self.project("o_proj", torch.cat(outs, -1))

    def scale(self) -> float:
        parameters = self.config.source.get("rope_parameters", {})
        mscale = 1 + 0.1 * parameters.get("mscale_all_dim", 0.0) * math.log(parameters.get("factor", 1.0))
        return float(mscale**2 / math.sqrt(self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim))

    def allowed(self, x: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """bool [T, T]: which tokens each row attends to."""
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        index = self.mla.index
        if index is None:
            return causal
        rope = self.mla.qk_rope_head_dim
        k = self.project("indexer.wk", x)
        weight, bias = (self.weights[f"indexer.k_norm.{kind}"].double() for kind in ("weight", "bias"))
        k = torch.nn.functional.layer_norm(k, [k.shape[1]], weight, bias, 1e-6)
        q = self.project("indexer.wq_b", low).view(len(x), index.num_heads, -1).transpose(0, 1)
        k, q = (torch.cat((self.turned(each[..., :rope], False), each[..., rope:]), -1) for each in (k, q))
        weights = self.project("indexer.weights_proj", x).t().unsqueeze(-1)
        scores = (weights * (q @ k.t()).relu()).sum(0)
        chosen = torch.zeros_like(causal)
        for row, values in enumerate(scores.tolist()):
            best = sorted(range(row + 1), key=lambda p: (-values[p], p))
            chosen[row, best[: index.topk]] = True
        return chosen


@dataclass
class Layer:
    """A layer with random weights, and the naive one with the same."""

    folder: Path
    indexer: bool
    entries: dict[str, Any]

    def __post_init__(self) -> None:
        (self.folder / "config.json").write_text(json.dumps(BASE | self.entries))
        config = ModelConfig.from_folder(self.folder)
        mla = MLAConfig.of(config, self.indexer)
        generator = torch.Generator().manual_seed(3)
        weights = {
            name: torch.randn(shape, generator=generator) * (2 / math.sqrt(shape[-1]) if len(shape) > 1 else 1.0)
            for name, shape in mla.shapes(config).items()
        }
        save_file({f"{PREFIX}.{name}": weight for name, weight in weights.items()}, self.folder / "model.safetensors")
        self.naive = Naive(config, mla, weights)
        self.kernels = TorchBackend()
        loaded = load_weights(self.folder, {f"{PREFIX}.{n}": tuple(w.shape) for n, w in weights.items()})
        build = Build(config, self.kernels, loaded, torch.float32, 128)
        self.attention = MLAttention(build, PREFIX, 0, mla)
        self.rotary = RotaryEmbedding(config.rope, mla.qk_rope_head_dim, 128)
        self.cache = self.kernels.kv_cache.allocate(mla.kv_spec, 1, len(BLOCKS), 16, torch.float32)

    def run(self, x: torch.Tensor, borders: list[int]) -> torch.Tensor:
        """The layer's output for x [T, H], computed in chunks between `borders`."""
        set_kv_cache_data({"layers.0": KVCacheTensor(0, self.cache)})
        outs = []
        for start, end in pairwise(borders):
            positions = torch.arange(start, end)
            step = metadata([Rows(start, end, BLOCKS)], 16)
            step.plan = self.kernels.attention.plan(step, self.cache, HEADS)
            set_forward_context(step, Config(model=str(self.folder)), Context(positions, True, 1, end - start))
            outs.append(self.attention(x[start:end], self.rotary(positions)))
        reset_forward_context()
        return torch.cat(outs)


CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "full": (False, {}),
    "no-query-latent": (False, {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None}),
    "halves": (False, {"rope_interleave": False}),
    "biases": (False, {"attention_bias": True}),
    "yarn": (False, {"rope_parameters": YARN}),
    "sparse": (True, {}),
    "sparse-yarn": (True, {"rope_parameters": YARN, "index_topk": 64}),
    "sparse-one": (True, {"index_topk": 1}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_absorbed_equals_naive(case: str, tmp_path: Path) -> None:
    layer = Layer(tmp_path, *CASES[case])
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = layer.naive(x.double())
    for borders in ([0, TOKENS], [0, 1, 2, 19, 20, 21, 64, 65, TOKENS]):
        error = (layer.run(x, borders).double() - expected).abs().max() / expected.abs().max()
        assert error < 5e-6, f"relative error {error:.1e}"


def test_sparse_and_full_attention_differ(tmp_path: Path) -> None:
    """So that the cases above tell the two apart, from the first row on that has more than `index_topk` tokens."""
    layer = Layer(tmp_path, True, {})
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).double()
    sparse = layer.naive(x)
    layer.naive.mla = MLAConfig.of(layer.naive.config, False)
    difference = (sparse - layer.naive(x)).abs().amax(1)
    assert not difference[:20].any()
    assert (difference[20:] > 1e-3).all()


def test_softmax_scale_of_deepseek_v3(tmp_path: Path) -> None:
    """192 ** -0.5 * (0.1 * ln(40) + 1) ** 2 = 0.1352, from the published config.json."""
    rope = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    entries = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": rope, "rope_theta": 10000}
    (tmp_path / "config.json").write_text(json.dumps(BASE | entries))
    config = ModelConfig.from_folder(tmp_path)
    assert softmax_scale(config, MLAConfig.of(config, False)) == pytest.approx(0.1352, abs=5e-5)


def test_cache_entry_of_deepseek_v3() -> None:
    """576 numbers per token and layer instead of 2 * 128 * 128; V3.2 adds its index key of 128."""
    full = MLAConfig(1536, 512, 128, 64, 128, interleaved=True)
    sparse = replace(full, index=IndexSpec(64, 128, 2048))
    assert (full.kv_spec.values_per_token, sparse.kv_spec.values_per_token) == (576, 704)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is None; it must be a whole number"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be an integer of at least 1"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim 5, of which 5 are rotated: rotary embeddings need an even number"),
        ({"q_lora_rank": None}, "q_lora_rank is None; it must be a whole number"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": None},
            "q_lora_rank is null; the indexer needs",
        ),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 6"),
        ({"index_topk": 0}, "index_topk is 0; it must be an integer of at least 1"),
    ],
)
def test_invalid_mla_config_error_is_one_line(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | entries))
    with pytest.raises(ModelError, match=message):
        MLAConfig.of(ModelConfig.from_folder(tmp_path), True)
