"""Draft layers of checkpoints and EAGLE-3 heads against independent arithmetic, in float32, row by row.

The reference computes whole sequences at once. Of an EAGLE-3 head it is plain PyTorch after the paper
(arXiv:2503.01840) and the layout of published heads; of MTP layers it is the formula of DeepSeek-V3's report
(arXiv:2412.19437, section 2.2) around a decoder layer of `transformers`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import Config
from kernels.select import select_backend
from tests.checkpoints import make_checkpoint, make_eagle3_head, make_mtp_checkpoint
from worker.config.architectures import draft_head_arch_dict
from worker.config.model_config import ModelConfig, ModelError
from worker.model.architectures import CausalModel, DraftModel
from worker.model.model_loader import ModelLoader
from worker.model.models.eagle3 import Eagle3Head, aux_layers
from worker.model.sharding import Shard
from worker.model.speculation.draft_runner import DraftRows, DraftRunner
from worker.weights.checkpoint import no_progress

BLOCK_SIZE = 16
LENGTH = 70
CHAIN = 3
TOLERANCE = 1e-4
TABLE = [5, 2, 7, 0, 3, 6]
# Chunks of rows, the last one a row.
PARTS = [(0, 33), (33, 48), (48, LENGTH - 1), (LENGTH - 1, LENGTH)]
# Token ids of the positions 1 and on, states at the positions before -> states of the draft model at these.
Draft = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loader(folder: Path, config: ModelConfig, kernels: str = "cpu", **wanted: Any) -> ModelLoader:
    cache = wanted.pop("weights_cache", "")
    return ModelLoader(
        Config(model=str(folder), dtype="float32", kv_cache_block_size=BLOCK_SIZE, weights_cache=cache),
        config,
        select_backend(kernels),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        packed_format=None,
        max_position=256,
        shard=Shard(),
        **wanted,
    )


def target_states(model: CausalModel, config: ModelConfig, kernels: str, tokens: torch.Tensor) -> torch.Tensor:
    """[T, (1 + n) H] of our model, in chunks."""
    spec, names = model.kv_spec(config, Shard()), tuple(f"layers.{i}" for i in range(config.num_hidden_layers))
    runner = draft_runner(kernels, names, spec, config.num_attention_heads)
    data = runner.kv_cache_data(allocated(runner, kernels))
    parts = []
    for start, end in PARTS:
        rows = rows_of(tokens, start, end)
        parts.append(runner.run(lambda ids, at, _: model.forward(ids, at), rows, torch.zeros(end - start, 0), data))
    return torch.cat(parts)


def draft_runner(kernels: str, names: tuple[str, ...], spec: Any, heads: int) -> DraftRunner:
    config = Config(model="", kv_cache_block_size=BLOCK_SIZE)
    return DraftRunner(config, select_backend(kernels), names, spec, heads)


def allocated(runner: DraftRunner, kernels: str) -> Any:
    backend = select_backend(kernels)
    return backend.kv_cache.allocate(runner.kv_spec, runner.num_layers, 8, BLOCK_SIZE, torch.float32)


def rows_of(tokens: torch.Tensor, start: int, end: int) -> DraftRows:
    return DraftRows(np.array([start]), np.array([end - start]), [TABLE], tokens[start:end].numpy())


def own_logits(draft: DraftModel, runner: DraftRunner, kernels: str, tokens: torch.Tensor, states: torch.Tensor) -> Any:
    """float32 [LENGTH + CHAIN - 1, V]: logits of the chunks, then of the chain after them, on given tokens."""
    data = runner.kv_cache_data(allocated(runner, kernels))
    found = []
    for start, end in PARTS:
        last = runner.run(draft.forward, rows_of(tokens[1:], start, end), draft.combine(states[start:end]), data)
        found.append(draft.compute_logits(last))
    for position in range(LENGTH, LENGTH + CHAIN - 1):
        last = runner.run(draft.forward, rows_of(tokens[1:], position, position + 1), last[-1:], data)
        found.append(draft.compute_logits(last))
    return torch.cat(found)


def expected_states(draft: Draft, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The same of a reference that sees whole sequences: its states at the last row go on the sequence."""
    for position in range(LENGTH, LENGTH + CHAIN):
        made = draft(tokens[1 : position + 1], states)
        states = torch.cat((states, made[-1:]))
    return made


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    finite = expected.isfinite()
    assert torch.equal(actual.isfinite(), finite)
    error = (actual - expected)[finite].abs().max() / expected[finite].abs().max()
    assert error < TOLERANCE, f"relative error {error:.1e}"


def sequence(vocab: int) -> torch.Tensor:
    return torch.randint(5, vocab, (LENGTH + CHAIN,), generator=torch.Generator().manual_seed(3))


# EAGLE-3.


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions of [heads, T, D]: pairs lie half a head apart."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]).float(), theta ** -(torch.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class ReferenceHead:
    """An EAGLE-3 head over a whole sequence."""

    def __init__(self, folder: Path, embedding: torch.Tensor) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(f"midlayer.self_attn.{name}", x)
        return made.view(len(x), -1, self.config["head_dim"]).transpose(0, 1)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        theta = self.config["rope_theta"]
        q, k = turned(self.heads("q_proj", x), theta), turned(self.heads("k_proj", x), theta)
        v = self.heads("v_proj", x)
        k, v = (each.repeat_interleave(len(q) // len(each), dim=0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        causal = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        mixed = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        return self.linear("midlayer.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        normed = self.norm("midlayer.hidden_norm", states)
        embedded = self.norm("midlayer.input_layernorm", self.embedding[tokens])
        residual = normed if self.config.get("norm_before_residual") else states
        x = residual + self.attention(torch.cat((embedded, normed), dim=-1))
        y = self.norm("midlayer.post_attention_layernorm", x)
        gate, up = (self.linear(f"midlayer.mlp.{name}", y) for name in ("gate_proj", "up_proj"))
        return x + self.linear("midlayer.mlp.down_proj", torch.nn.functional.silu(gate) * up)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        drafted = self.linear("lm_head", self.norm("norm", states))
        every = torch.full((len(states), self.config["vocab_size"]), -torch.inf)
        # Without a table all ids are drafted.
        offsets = self.weights["d2t"].tolist() if "d2t" in self.weights else [0] * drafted.shape[1]
        for draft, offset in enumerate(offsets):
            every[:, draft + offset] = drafted[:, draft]
        return every


@pytest.mark.parametrize(
    ("target", "entries", "kernels"),
    [
        ({"architecture": "qwen3"}, {}, "cpu"),
        ({"architecture": "qwen3"}, {"norm_before_residual": True, "attention_bias": True}, "torch"),
        (
            {"architecture": "llama", "num_hidden_layers": 5},
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 0, 1]}, "mlp_bias": True},
            "cpu",
        ),
        (
            {"architecture": "mixtral", "tie_word_embeddings": False},
            {"hidden_size": 48, "target_hidden_size": 64},
            "cpu",
        ),
    ],
    ids=["qwen3", "qwen3-torch", "llama-own-layers", "mixtral-other-width"],
)
def test_eagle3_head_equals_reference(
    target: dict[str, Any], entries: dict[str, Any], kernels: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "target", tokenizer=False, **target)
    head_folder = make_eagle3_head(tmp_path / "head", folder, **entries)
    weights = load_file(head_folder / "model.safetensors")
    width = weights["norm.weight"].shape[0]
    for name, size in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
        if entries.get(name):
            projections = [each for each in weights if size in each]
            weights |= {
                each.replace("weight", "bias"): torch.randn(weights[each].shape[0]) * 0.3 for each in projections
            }
    if "hidden_size" in entries:
        weights["embed_tokens.weight"] = torch.randn(DEFAULT_VOCAB, width)
    save_file(weights, head_folder / "model.safetensors")
    config = ModelConfig.from_folder(folder)
    head_config = ModelConfig.from_folder(head_folder, tuple(draft_head_arch_dict))
    layers = aux_layers(head_config, config.num_hidden_layers)
    model: Any = loader(folder, config, kernels, aux_layers=layers).load(no_progress)
    head = loader(head_folder, head_config, kernels).load_head(no_progress)
    head.share(model.embedding)

    tokens = sequence(config.vocab_size)
    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = hf(tokens[None, :LENGTH], output_hidden_states=True).hidden_states
    reference = ReferenceHead(head_folder, hf.get_input_embeddings().weight.detach())
    aux = torch.cat([hidden[layer][0] for layer in layers], dim=1)
    states = target_states(model, config, kernels, tokens)
    close(states[:, config.hidden_size :], aux)

    expected = reference.logits(expected_states(reference, tokens, reference.linear("fc", aux)))
    runner = draft_runner(kernels, head.kv_names, head.kv_spec(head_config, Shard()), head_config.num_attention_heads)
    close(own_logits(head, runner, kernels, tokens, states), expected)


DEFAULT_VOCAB = 384


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; it must be an integer of at least 1"),
        ({"num_hidden_layers": 2}, "LlamaForCausalLMEagle3 has 2 layers; supported: 1"),
        ({"vocab_size": 200}, "d2t does not give each draft id one of the 200 ids"),
        ({"intermediate_size": 80}, r"midlayer.mlp.down_proj.weight is \[64, 72\], expected \[64, 80\]"),
    ],
)
def test_unusable_draft_head_is_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", tokenizer=False, num_hidden_layers=1)
    folder = make_eagle3_head(tmp_path / "head", target)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    with pytest.raises(ModelError, match=message):
        loader(folder, ModelConfig.from_folder(folder, tuple(draft_head_arch_dict))).load_head(no_progress)


def test_aux_layers_beyond_target_are_refused(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", tokenizer=False, num_hidden_layers=2)
    folder = make_eagle3_head(tmp_path / "head", target)
    with pytest.raises(
        ModelError, match=r"eagle_aux_hidden_state_layer_ids \[2, 1, -1\] do not fit a target of 2 layers"
    ):
        aux_layers(ModelConfig.from_folder(folder, tuple(draft_head_arch_dict)), 2)


def test_draft_head_is_refused_as_model(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", tokenizer=False, num_hidden_layers=1)
    with pytest.raises(ModelError, match="architecture not supported: LlamaForCausalLMEagle3"):
        ModelConfig.from_folder(make_eagle3_head(tmp_path / "head", target))


# MTP.


class ReferenceMtp:
    """The MTP layer of a checkpoint whose config.json counts it as one of the others."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.weights = load_file(folder / "model.safetensors")
        self.prefix = f"model.layers.{config['num_hidden_layers']}"
        self.eps = config["rms_norm_eps"]
        whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        last = config["num_hidden_layers"]
        self.layer = whole.model.layers[last]
        self.target = whole.model
        self.target.layers = whole.model.layers[:last]
        self.target_norm = whole.model.norm

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return norm(x, self.weights[f"{self.prefix}.{name}.weight"], self.eps)

    def run(self, layers: list[Any], last_norm: Any, **inputs: Any) -> torch.Tensor:
        self.target.layers, self.target.norm = torch.nn.ModuleList(layers), last_norm
        self.target.config.num_hidden_layers = len(layers)
        with torch.no_grad():
            states: torch.Tensor = self.target(use_cache=False, **inputs).last_hidden_state[0]
        return states

    def __call__(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedded = self.weights[f"{self.prefix}.embed_tokens.weight"][tokens]
        both = torch.cat((self.norm("enorm", embedded), self.norm("hnorm", states)), dim=-1)
        joined = both @ self.weights[f"{self.prefix}.eh_proj.weight"].T
        return self.run([self.layer], torch.nn.Identity(), inputs_embeds=joined[None])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm("shared_head.norm", states) @ self.weights[f"{self.prefix}.shared_head.head.weight"].T


@pytest.mark.parametrize("architecture", ["deepseek_v3", "deepseek_v32", "glm4_moe"])
def test_mtp_layer_equals_reference(architecture: str, tmp_path: Path) -> None:
    folder = make_mtp_checkpoint(tmp_path / "model", architecture, tokenizer=False, num_hidden_layers=2)
    source = json.loads((folder / "config.json").read_text())
    config = ModelConfig.from_folder(folder)
    cache = str(tmp_path / "cache")
    made: list[Any] = [loader(folder, config, drafts=True, weights_cache=cache).load(no_progress) for _ in range(2)]
    tokens = sequence(config.vocab_size)

    counted = source | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    counted |= {key: [*source[key], source[key][-1]] for key in ("layer_types", "mlp_layer_types") if source.get(key)}
    (folder / "config.json").write_text(json.dumps(counted))
    reference = ReferenceMtp(folder, source)
    states = reference.run(list(reference.target.layers), reference.target_norm, input_ids=tokens[None, :LENGTH])
    expected = reference.logits(expected_states(reference, tokens, states))

    for model in made:
        close(target_states(model, config, "cpu", tokens), states)
        layer = model.draft_layer
        assert layer is not None
        runner = draft_runner("cpu", layer.kv_names, model.kv_spec(config, Shard()), config.num_attention_heads)
        close(own_logits(layer, runner, "cpu", tokens, states), expected)


def test_shared_matrices_are_held_once(tmp_path: Path) -> None:
    """Equal numbers, or none, are the target's; others are the layer's own."""
    folder = make_mtp_checkpoint(tmp_path, "glm4_moe", tokenizer=False, num_hidden_layers=1)
    config = ModelConfig.from_folder(folder)
    model: Any = loader(folder, config, drafts=True).load(no_progress)
    assert model.draft_layer._embedding is model.embedding
    assert model.draft_layer._head is not model.head
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.shared_head.head.weight"]
    weights["model.layers.1.embed_tokens.weight"][-1, -1] += 1
    save_file(weights, folder / "model.safetensors")
    model = loader(folder, config, drafts=True).load(no_progress)
    assert model.draft_layer._embedding is not model.embedding
    assert model.draft_layer._head is model.head


def test_models_without_such_layers_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe", tokenizer=False, num_hidden_layers=1, num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match="no num_nextn_predict_layers"):
        loader(folder, ModelConfig.from_folder(folder), drafts=True).load(no_progress)
    llama = make_checkpoint(tmp_path / "llama", "llama", tokenizer=False, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no layers that draft \(MTP\)"):
        loader(llama, ModelConfig.from_folder(llama), drafts=True).load(no_progress)


def test_head_without_embedding_uses_target_embedding(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", tokenizer=False, num_hidden_layers=1)
    folder = make_eagle3_head(tmp_path / "head", target, hidden_size=48, target_hidden_size=64)
    config = ModelConfig.from_folder(folder, tuple(draft_head_arch_dict))
    model: Any = loader(target, ModelConfig.from_folder(target)).load(no_progress)
    head: Eagle3Head = loader(folder, config).load_head(no_progress)
    with pytest.raises(ModelError, match=r"embed_tokens.weight is missing, and the target's has 64 columns, not 48"):
        head.share(model.embedding)
