"""Tensors of GGUF files: values exactly as each type's description has them, whole and in parts."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.grouped_weight import GroupedWeight
from kernels.quantized_weight import as_floats
from tests.checkpoints import make_checkpoint, make_mtp_checkpoint
from tests.gguf_files import (
    FACTORS,
    QUANTIZED,
    TYPES,
    GgufContent,
    GgufTensorData,
    convert,
    float_tensor,
    values_of,
)
from worker.config.model_config import ModelConfig, ModelError
from worker.model.architectures import model_class
from worker.weights.checkpoint import Weights, load_weights, weight_files, weights_digest
from worker.weights.gguf_tensors import gguf_weight
from worker.weights.stored_tensors import MatrixPart

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_values_are_exactly_those_of_the_description(kind: str) -> None:
    """Of blocks of random bytes whose factors are any finite numbers, negative ones and zeros too."""
    rng = np.random.default_rng(3)
    _, numbers, size = TYPES[kind]
    blocks = rng.integers(0, 256, (7, 512 // numbers, size), dtype=np.uint8)
    for place in FACTORS[kind]:
        factors = rng.normal(size=(7, 512 // numbers, 1)).astype(np.float16)
        factors[0] = 0.0
        blocks[:, :, place : place + 2] = factors.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] %= 252
    stored = blocks.reshape(7, -1)
    floats = as_floats(gguf_weight(torch.from_numpy(stored), kind))
    assert torch.equal(floats, torch.from_numpy(values_of(kind, stored)))


def written(folder: Path, kind: str, architecture: str = "llama", **shape: object) -> tuple[GgufContent, Weights]:
    """A file in `folder`, beside the checkpoint that it is worth, with its weights."""
    make_checkpoint(folder, architecture, **{**WIDE, **shape})  # type: ignore[arg-type]
    content = convert(folder, kind)
    (folder / "m.gguf").write_bytes(content.to_bytes())
    config = ModelConfig.from_folder(folder / "m.gguf")
    shapes = model_class(config.architecture).tensor_shapes(config)
    return content, load_weights(folder / "m.gguf", shapes)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q6_K"])
def test_tensors_and_parts_are_those_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    """Queries and keys in their own order of rows, though the file stores them in pairs."""
    _, weights = written(tmp_path, kind, attention_bias=True)
    expected = load_file(tmp_path / "model.safetensors")
    for name, tensor in expected.items():
        if name in weights:
            assert torch.equal(weights.take(name, dtype=torch.float32), tensor), name
    name = "model.layers.0.self_attn.k_proj.weight"
    rows, columns = slice(3, 41), slice(64, 192)
    part = weights.take(name, rows, columns, dtype=torch.float32)
    assert torch.equal(part, expected[name][rows, columns])
    if kind in QUANTIZED:
        kept = weights.take_quantized(MatrixPart(name, rows, columns))
        assert torch.equal(as_floats(kept), expected[name][rows, columns])
        assert weights.use.kept == {name}


LATENT = {"num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize(
    ("architecture", "kind", "shape", "floats"),
    [
        ("mixtral", "Q8_0", {"intermediate_size": 64}, "block_sparse_moe.gate"),
        ("granitemoe", "Q5_1", {"intermediate_size": 64}, "router.layer"),
        ("granitemoe", "F16", {"intermediate_size": 64}, ""),
        ("olmo2", "IQ4_NL", {}, None),
        ("olmo3", "IQ4_XS", {}, None),
        ("gpt_oss", "MXFP4", {"intermediate_size": 64}, "_bias|router|sinks"),
        ("gpt_oss", "BF16", {"intermediate_size": 48}, ""),
        ("glm4_moe", "Q5_0", {"moe_intermediate_size": 64, "first_k_dense_replace": 0}, r"mlp\.gate\."),
        ("deepseek_v2", "F32", LATENT, ""),
        ("deepseek_v3", "Q8_0", LATENT, r"mlp\.gate\.|kv_b_proj"),
    ],
)
def test_tensors_equal_the_checkpoint_and_keep_codes(
    tmp_path: Path, architecture: str, kind: str, shape: dict[str, object], floats: str | None
) -> None:
    """Whole, and some rows and columns of each matrix. All matrices but those named `floats` are in codes."""
    _, weights = written(tmp_path, kind, architecture, **shape)
    config = ModelConfig.from_folder(tmp_path / "m.gguf")
    original = ModelConfig.from_folder(tmp_path)
    assert (config.architecture, config.rope) == (original.architecture, original.rope)
    expected = load_file(tmp_path / "model.safetensors")
    assert set(model_class(config.architecture).tensor_shapes(config)) == expected.keys()
    for name, tensor in expected.items():
        has_codes = tensor.dim() > 1 and floats != "" and not (floats and re.search(floats, name))
        assert (weights.quantized(name) is not None) == has_codes, name
        assert torch.equal(weights.take(name, dtype=torch.float32), tensor.float()), name
        if tensor.dim() == 2:
            rows, columns = slice(3, tensor.shape[0] - 2), slice(1, tensor.shape[1] - 3)
            assert torch.equal(weights.take(name, rows, columns, dtype=torch.float32), tensor[rows, columns].float())
        if tensor.dim() == 3:
            one, rows, columns = slice(1, 3), slice(2, 33), slice(5, tensor.shape[2] - 4)
            part = weights.take(name, one, columns, rows, dtype=torch.float32)
            assert torch.equal(part, tensor[one, rows, columns].float())
        if (stored := weights.quantized(name)) is not None and tensor.dim() == 3:
            matrix = tensor[2].mT if stored.transposed else tensor[2]
            kept = weights.take_quantized(MatrixPart(name, slice(2, 41), expert=2, transposed=stored.transposed))
            assert isinstance(kept, GroupedWeight)
            assert torch.equal(as_floats(kept), matrix[2:41])


def test_tensors_of_a_drafting_layer_are_optional(tmp_path: Path) -> None:
    make_mtp_checkpoint(tmp_path, "glm4_moe", **{**WIDE, "num_hidden_layers": 2})
    file = tmp_path / "m.gguf"
    file.write_bytes(convert(tmp_path, "Q8_0").to_bytes())
    config = ModelConfig.from_folder(file)
    assert (config.num_hidden_layers, config.source["num_nextn_predict_layers"]) == (2, 1)
    architecture, expected = model_class(config.architecture), load_file(tmp_path / "model.safetensors")
    shapes, kept = architecture.tensor_shapes(config), architecture.kept_tensors(config)
    assert "model.layers.2.eh_proj.weight" not in load_weights(file, shapes, kept=kept)
    with pytest.raises(ModelError, match=r"surplus blk.2.attn_k.weight"):
        load_weights(file, shapes)
    drafts = architecture.draft_shapes(config)
    weights = load_weights(file, shapes | drafts, optional=architecture.optional_draft_shapes(config), kept=kept)
    for name, tensor in expected.items():
        assert torch.equal(weights.take(name, dtype=torch.float32), tensor), name


def test_numbers_of_heads_may_be_listed_by_layer(tmp_path: Path) -> None:
    content, weights = written(tmp_path, "F32", num_hidden_layers=2)
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = weights.take(name)
    for key in ("llama.attention.head_count", "llama.attention.head_count_kv"):
        content.metadata[key] = [content.metadata[key]] * 2
    (tmp_path / "m.gguf").write_bytes(content.to_bytes())
    config = ModelConfig.from_folder(tmp_path / "m.gguf")
    shapes = model_class(config.architecture).tensor_shapes(config)
    assert torch.equal(load_weights(tmp_path / "m.gguf", shapes).take(name), expected)


def test_rope_scaling_without_type_is_linear(tmp_path: Path) -> None:
    content, _ = written(tmp_path, "F32")
    content.metadata["llama.rope.scaling.factor"] = 4.0
    file = tmp_path / "m.gguf"
    file.write_bytes(content.to_bytes())
    rope = ModelConfig.from_folder(file).rope
    assert (rope.type, rope.factor) == ("linear", 4.0)
    content.tensors["rope_freqs.weight"] = float_tensor("F32", torch.ones(16))
    file.write_bytes(content.to_bytes())
    with pytest.raises(ModelError, match=r"rope_freqs.weight together with rope.scaling.type linear"):
        ModelConfig.from_folder(file)


def test_vector_of_a_quantized_type_is_refused(tmp_path: Path) -> None:
    content, _ = written(tmp_path, "Q8_0")
    content.tensors["blk.0.attn_norm.weight"] = GgufTensorData("Q8_0", (256,), bytes(8 * 34))
    (tmp_path / "m.gguf").write_bytes(content.to_bytes())
    config = ModelConfig.from_folder(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="which only matrices can have"):
        load_weights(tmp_path / "m.gguf", model_class(config.architecture).tensor_shapes(config))


def test_experts_are_matrices_of_their_own(tmp_path: Path) -> None:
    _, weights = written(tmp_path, "Q4_K", "qwen3_moe", moe_intermediate_size=256)
    expected = load_file(tmp_path / "model.safetensors")
    for expert in range(7):
        name = f"model.layers.0.mlp.experts.{expert}.down_proj.weight"
        assert torch.equal(as_floats(weights.take_quantized(MatrixPart(name))), expected[name])


def test_stack_of_more_experts_than_the_metadata_says_is_refused(tmp_path: Path) -> None:
    content, _ = written(tmp_path, "Q4_K", "qwen3_moe", moe_intermediate_size=256)
    stored = content.tensors["blk.0.ffn_up_exps.weight"]
    count, *matrix = stored.shape
    more = stored.data + stored.data[: len(stored.data) // count]
    content.tensors["blk.0.ffn_up_exps.weight"] = GgufTensorData("Q4_K", (count + 1, *matrix), more)
    (tmp_path / "m.gguf").write_bytes(content.to_bytes())
    config = ModelConfig.from_folder(tmp_path / "m.gguf")
    said = f"do not fit its metadata: blk.0.ffn_up_exps.weight has {count + 1} experts, expected {count}$"
    with pytest.raises(ModelError, match=said):
        load_weights(tmp_path / "m.gguf", model_class(config.architecture).tensor_shapes(config))


@pytest.mark.parametrize("name", ["rope_factors_long.weight", "rope_factors_short.weight"])
def test_factors_of_rope_that_are_not_used_are_surplus(tmp_path: Path, name: str) -> None:
    said = f"surplus {name}$"
    check_refused(tmp_path, "llama", {name: float_tensor("F32", torch.ones(16))}, said)


def test_two_tensors_for_one_of_the_model_are_refused(tmp_path: Path) -> None:
    norm = {f"blk.0.{part}_norm.weight": float_tensor("F32", torch.zeros(256)) for part in ("post_attention", "ffn")}
    said = "the same tensor twice: blk.0.post_attention_norm.weight and blk.0.ffn_norm.weight$"
    check_refused(tmp_path, "glm4_moe", norm, said)


def test_number_of_a_layer_has_no_zeros_in_front(tmp_path: Path) -> None:
    """Former fault: `blk.00` took the place of `blk.0`."""
    norm = float_tensor("F32", torch.zeros(256))
    check_refused(tmp_path, "llama", {"blk.00.attn_norm.weight": norm}, "surplus blk.00.attn_norm.weight$")


def test_matrices_of_single_experts_need_a_new_conversion(tmp_path: Path) -> None:
    one = float_tensor("F32", torch.zeros(64, 256))
    said = "surplus blk.0.ffn_up.0.weight; convert the model again$"
    check_refused(tmp_path, "mixtral", {"blk.0.ffn_up.0.weight": one}, said)


def check_refused(folder: Path, architecture: str, further: dict[str, GgufTensorData], said: str) -> None:
    """Checks that a file with further tensors is refused."""
    content = convert(make_checkpoint(folder, architecture, **WIDE), "F32")  # type: ignore[arg-type]
    content.tensors.update(further)
    (folder / "m.gguf").write_bytes(content.to_bytes())
    config = ModelConfig.from_folder(folder / "m.gguf")
    with pytest.raises(ModelError, match=said):
        load_weights(folder / "m.gguf", model_class(config.architecture).tensor_shapes(config))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    content, _ = written(tmp_path, "Q8_0")
    content.tensors["blk.0.attn_norm.weight"] = float_tensor("F32", torch.zeros(3))
    content.tensors["blk.0.extra.weight"] = content.tensors.pop("blk.0.ffn_norm.weight")
    (tmp_path / "m.gguf").write_bytes(content.to_bytes())
    config = ModelConfig.from_folder(tmp_path / "m.gguf")
    with pytest.raises(ModelError) as error:
        load_weights(tmp_path / "m.gguf", model_class(config.architecture).tensor_shapes(config))
    for said in (
        "missing model.layers.0.post_attention_layernorm.weight",
        "surplus blk.0.extra.weight",
        "model.layers.0.input_layernorm.weight is [3], expected [256]",
    ):
        assert said in str(error.value)


def test_digest_changes_with_metadata_and_weights(tmp_path: Path) -> None:
    content, _ = written(tmp_path, "Q8_0")
    file = tmp_path / "m.gguf"
    digests = [weights_digest(file), weights_digest(file)]
    content.metadata["general.name"] = "x"
    file.write_bytes(content.to_bytes())
    digests.append(weights_digest(file))
    whole = bytearray(content.to_bytes())
    whole[-9] ^= 1
    file.write_bytes(whole)
    digests.append(weights_digest(file))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    assert [name for name, _, _ in weight_files(file)] == ["m.gguf"]
