"""Quantized checkpoints against the worth of their numbers, one by one, as tests/quantizers.py defines it."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config, LayerQuantConfig, QuantizationConfig
from tests.checkpoints import make_checkpoint
from tests.quantizers import SCHEMES, Floats, Scheme, Stored, bf16, quantize_checkpoint, write_safetensors
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.model.model_runner import ModelRunner
from worker.model.models.qwen3 import Qwen3ForCausalLM
from worker.weights.checkpoint import Weights, load_weights

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 160,
    "intermediate_size": 288,
    "head_dim": 48,
    "tie_word_embeddings": False,
}
# How far the logits may be from those of the original, as a share of their size: two to three times the largest error
# of one number, 1/16 for FP8 and 1/6 for FP4, since random weights enlarge it on its way; 1/254 of the row's largest
# number for INT8, of which most are a fraction.
LOGIT_ERROR = {"fp8": 0.15, "fnuz": 0.15, "int8": 0.05, "fp4": 0.5}
TOKENS = [7, 77, 177, 277, 377, 99]
PARTS = (slice(None), slice(5, 133), slice(129, 131), slice(37, 37))
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original"), tokenizer=False, **SHAPE)


@pytest.fixture(scope="module", params=list(SCHEMES))
def quantized(
    request: pytest.FixtureRequest, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Scheme, Path, dict[str, Floats]]:
    folder = tmp_path_factory.mktemp("quantized") / "checkpoint"
    shutil.copytree(original, folder)
    scheme = SCHEMES[request.param]
    return scheme, folder, quantize_checkpoint(folder, scheme)


def load(folder: Path, **given: Any) -> Weights:
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, Qwen3ForCausalLM.tensor_shapes(config), quantization=config.quant_config, **given)


def logits(folder: Path, **given: Any) -> torch.Tensor:
    config = Config(model=str(folder), dtype="float32", max_model_len=64, **given)
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    runner.allocate_kv_cache(4)
    seq = Sequence(TOKENS, 16)
    seq.block_table = [2]
    return runner.run_model(runner.prepare_model(ScheduledBatch({seq.id: seq}, [6], 6)))


def test_every_weight_bit_for_bit(quantized: tuple[Scheme, Path, dict[str, Floats]]) -> None:
    _, folder, worths = quantized
    seen: list[tuple[int, int]] = []
    weights = load(folder, progress=lambda done, total: seen.append((done, total)))
    for name, worth in worths.items():
        taken = weights.take(name)
        assert taken.dtype == torch.float32
        assert np.array_equal(taken.numpy(), worth), name
    assert seen[-1][0] == seen[-1][1]


def test_parts_in_the_models_dtype(quantized: tuple[Scheme, Path, dict[str, Floats]]) -> None:
    _, folder, worths = quantized
    weights = load(folder)
    for rows, columns in product(PARTS, PARTS):
        part = worths[DOWN][rows, columns]
        out = torch.full(part.shape, torch.nan, dtype=torch.bfloat16)
        weights.copy_to(out, DOWN, rows=rows, columns=columns)
        assert np.array_equal(out.float().numpy(), bf16(part)[1]), (rows, columns)


def test_logits(quantized: tuple[Scheme, Path, dict[str, Floats]], original: Path, tmp_path: Path) -> None:
    """Equal to the bit to a float checkpoint of the same worth, and to the original within the format's error."""
    scheme, folder, worths = quantized
    shutil.copytree(original, tmp_path / "worth")
    write_safetensors(tmp_path / "worth" / "model.safetensors", {name: ("F32", w) for name, w in worths.items()})
    actual = logits(folder)
    assert torch.equal(actual, logits(tmp_path / "worth"))
    expected = logits(original)
    error = float((actual - expected).norm() / expected.norm())
    assert 0 < error < LOGIT_ERROR[scheme.number]


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("deepseek_v3", "deepseek"),
        ("deepseek_v32", "deepseek"),
        ("qwen3_moe", "quark-mxfp4"),
        ("mixtral", "compressed-tensors-fp8-channel"),
        ("glm4_moe", "compressed-tensors-int8-channel"),
    ],
)
def test_logits_of_other_architectures(tmp_path: Path, architecture: str, name: str) -> None:
    """Equal to a dequantized float checkpoint to the bit: latent attention, indexers, experts one by one."""
    floats = make_checkpoint(tmp_path / "floats", architecture, tokenizer=False, num_hidden_layers=2)
    folder = tmp_path / "quantized"
    shutil.copytree(floats, folder)
    worths = quantize_checkpoint(folder, SCHEMES[name])
    expected = logits(floats)
    write_safetensors(floats / "model.safetensors", {name: ("F32", worth) for name, worth in worths.items()})
    actual = logits(folder)
    assert torch.equal(actual, logits(floats))
    assert not torch.equal(actual, expected)


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def stacked(scheme: Scheme, shape: tuple[int, int, int], scale_shape: tuple[int, ...] | None = None) -> Any:
    """Stored tensors and worth [E, N, K] of experts that are quantized one by one."""
    rng = np.random.default_rng(1)
    each = [scheme.quantize("", rng.normal(size=shape[1:]).astype(np.float32) * (e + 1)) for e in range(shape[0])]
    suffixes = (scheme.values_suffix, scheme.scales_suffix)
    stored = {suffix: (each[0][0][suffix][0], np.stack([t[suffix][1] for t, _ in each])) for suffix in suffixes}
    if scale_shape is not None:
        dtype, scales = stored[scheme.scales_suffix]
        stored[scheme.scales_suffix] = (dtype, scales.reshape(scale_shape))
    return {EXPERTS + suffix: tensor for suffix, tensor in stored.items()}, np.stack([worth for _, worth in each])


def check_parts(weights: Weights, worth: Floats) -> None:
    for rows, middle, columns in product((slice(None), slice(1, 3), slice(2, 2)), PARTS, PARTS):
        taken = weights.take(EXPERTS, rows=rows, middle=middle, columns=columns)
        assert np.array_equal(taken.numpy(), worth[rows, middle, columns]), (rows, middle, columns)


@pytest.mark.parametrize(
    ("name", "scale_shape"),
    [
        ("deepseek", None),
        ("fp8-per-tensor", (3,)),
        ("compressed-tensors-fp8-tensor", (3, 1, 1)),
        ("compressed-tensors-int8-channel", (3, 150)),
        ("compressed-tensors-fp8-channel", (3, 150, 1)),
        ("quark-mxfp4", None),
    ],
)
def test_stacked_experts(tmp_path: Path, name: str, scale_shape: tuple[int, ...] | None) -> None:
    shape = (3, 150, 160)
    stored, worth = stacked(SCHEMES[name], shape, scale_shape)
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = ModelConfig.from_folder(write_config(tmp_path, SCHEMES[name].config)).quant_config
    check_parts(load_weights(tmp_path, {EXPERTS: shape}, quantization=config), worth)


def test_single_scale_serves_all_experts(tmp_path: Path) -> None:
    stored: dict[str, Stored] = {
        EXPERTS: ("I8", np.arange(3 * 4 * 6, dtype=np.int8).reshape(3, 4, 6)),
        EXPERTS + "_scale": ("F32", np.array([0.5], np.float32)),
    }
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = QuantizationConfig(LayerQuantConfig("per_tensor", "int8"))
    weights = load_weights(tmp_path, {EXPERTS: (3, 4, 6)}, quantization=config)
    assert torch.equal(weights.take(EXPERTS), torch.arange(72).view(3, 4, 6) / 2)


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Stored transposed, in blocks of 16 bytes, under gpt-oss's names; everything else is float."""
    scheme = Scheme({}, (1, 32), "fp4", "U8", "_blocks", "_scales")
    stored, worth = stacked(scheme, (3, 150, 160))
    dtype, blocks = stored[EXPERTS + "_blocks"]
    stored[EXPERTS + "_blocks"] = (dtype, blocks.reshape(3, 150, 5, 16))
    write_safetensors(tmp_path / "model.safetensors", stored)
    spec = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = ModelConfig.from_folder(write_config(tmp_path, spec)).quant_config
    check_parts(load_weights(tmp_path, {EXPERTS: (3, 160, 150)}, quantization=config), worth.transpose(0, 2, 1))


def test_gpt_oss_weights_equal_transformers() -> None:
    """The worth that this file's quantizer gives is what transformers makes of the same blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scheme = Scheme({}, (1, 32), "fp4", "U8", "_blocks", "_scales")
    stored, worth = stacked(scheme, (3, 64, 96))
    blocks = torch.from_numpy(stored[EXPERTS + "_blocks"][1]).view(3, 64, 3, 16)
    scales = torch.from_numpy(stored[EXPERTS + "_scales"][1])
    theirs: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert np.array_equal(theirs.numpy(), worth.transpose(0, 2, 1))


def test_every_fp8_byte(tmp_path: Path) -> None:
    """NaN, zeros, subnormals and the largest, of both kinds."""
    from tests.quantizers import fp8_table

    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for dtype, fnuz in (("F8_E4M3", False), ("F8_E4M3FNUZ", True)):
        stored: dict[str, Stored] = {
            "a.weight": (dtype, codes),
            "a.weight_scale": ("F32", np.array(1, np.float32)),
        }
        write_safetensors(tmp_path / "model.safetensors", stored)
        config = QuantizationConfig(LayerQuantConfig("per_tensor", "fp8"))
        taken = load_weights(tmp_path, {"a.weight": (16, 16)}, quantization=config).take("a.weight")
        assert np.array_equal(taken.numpy().ravel(), fp8_table(fnuz), equal_nan=True)


def write_config(folder: Path, quantization_config: Any) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
        "quantization_config": quantization_config,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (LayerQuantConfig("per_1x128", "int4x2"), (4, 128), "I8"),
        (LayerQuantConfig("per_1x128", "int8x4"), (4, 128), "F8_E4M3"),
        (LayerQuantConfig("per_1x16", "fp4x2"), (2, 4, 128), "U8"),
    ],
)
def test_numbers_of_another_format_are_refused(
    tmp_path: Path, layer: LayerQuantConfig, shape: tuple[int, ...], dtype: str
) -> None:
    bits = np.int8 if dtype == "I8" else np.uint8
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": (dtype, np.ones(shape, bits))})
    with pytest.raises(ModelError, match=f"a.weight is {dtype}, expected F32, BF16 or F16"):
        load_weights(tmp_path, {"a.weight": shape}, quantization=QuantizationConfig(layer))


class TestWhatDoesNotFit:
    """Each problem is named."""

    @pytest.mark.parametrize(
        ("suffix", "change", "problem"),
        [
            ("_scale_inv", None, "missing a.weight_scale_inv or a.weight_scale"),
            ("_scale_inv", ("F32", np.ones((2, 1), np.float32)), "a.weight_scale_inv is [2, 1], expected [2, 2]"),
            (
                "_scale_inv",
                ("I8", np.ones((2, 2), np.int8)),
                "a.weight_scale_inv is I8, expected F32, BF16, F16 or F8_E8M0",
            ),
            ("", ("F8_E4M3", np.ones((150, 100), np.uint8)), "a.weight is [150, 100], expected [150, 160]"),
            (
                "",
                ("I8", np.ones((150, 160), np.int8)),
                "a.weight is I8, expected F8_E4M3, F8_E4M3FNUZ, F32, BF16 or F16",
            ),
            ("_zero_point", ("I8", np.ones((2, 2), np.int8)), "surplus a.weight_zero_point"),
            ("_packed", ("U8", np.ones((150, 80), np.uint8)), "surplus a.weight_packed"),
        ],
    )
    def test_malformed_quantized_tensor_is_refused(
        self, tmp_path: Path, suffix: str, change: Stored | None, problem: str
    ) -> None:
        weight = np.random.default_rng(0).normal(size=(150, 160)).astype(np.float32)
        tensors: dict[str, Any] = SCHEMES["deepseek"].quantize("a.weight", weight)[0] | {"a.weight" + suffix: change}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        write_safetensors(tmp_path / "model.safetensors", tensors)
        config = QuantizationConfig(LayerQuantConfig("per_128x128", "fp8"))
        with pytest.raises(ModelError) as error:
            load_weights(tmp_path, {"a.weight": (150, 160)}, quantization=config)
        assert problem in str(error.value)
        assert "\n" not in str(error.value)

    def test_excluded_quantized_tensor_is_refused(self, tmp_path: Path) -> None:
        weight = np.ones((150, 160), np.float32)
        write_safetensors(tmp_path / "model.safetensors", SCHEMES["w8a8-fp8"].quantize("model.a.weight", weight)[0])
        config = QuantizationConfig(LayerQuantConfig("per_token", "fp8"), exclude_layers=("a",))
        with pytest.raises(ModelError, match=r"model\.a\.weight is F8_E4M3, expected F32, BF16 or F16"):
            load_weights(tmp_path, {"model.a.weight": (150, 160)}, quantization=config)

    def test_scales_of_activations_are_no_surplus_beside_quantized_weights(self, tmp_path: Path) -> None:
        tensors = SCHEMES["w8a8-int8"].quantize("a.weight", np.ones((4, 6), np.float32))[0]
        tensors |= {f"a.{name}_scale": ("F32", np.ones(1, np.float32)) for name in ("input", "k", "v")}
        write_safetensors(tmp_path / "model.safetensors", tensors)
        config = QuantizationConfig(LayerQuantConfig("per_token", "int8"))
        load_weights(tmp_path, {"a.weight": (4, 6)}, quantization=config)
        float_only = {name: tensor for name, tensor in tensors.items() if "weight" not in name}
        write_safetensors(tmp_path / "model.safetensors", float_only)
        with pytest.raises(ModelError, match=r"surplus a\.input_scale, a\.k_scale, a\.v_scale"):
            load_weights(tmp_path, {})


def test_quantized_checkpoint_without_config_needs_option(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(original, folder)
    quantize_checkpoint(folder, SCHEMES["w8a8-int8"])
    expected = logits(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"proj\.weight is I8, expected F32, BF16 or F16"):
        logits(folder)
    given = QuantizationConfig(LayerQuantConfig("per_token", "int8"))
    assert torch.equal(logits(folder, quant_config=given), expected)


def test_contradicting_quant_config_is_refused(original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(original, folder)
    quantize_checkpoint(folder, SCHEMES["w8a8-int8"])
    with pytest.raises(ModelError, match="quant_config differs from the checkpoint's own"):
        logits(folder, quant_config=QuantizationConfig(LayerQuantConfig("per_token", "fp8")))
