"""Weights of products as they are stored: parts and joins have the dequantized worth, to the bit, and say why not.

A back end that keeps every format, and makes floats of it when it packs, stands in for a GPU's.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from common.config import LayerQuantConfig, QuantizationConfig
from kernels.cpu.backend import CpuBackend
from kernels.interface import PackedFormat, QuantizedWeight
from kernels.quantized_weight import as_floats, joined_weights, selected_rows
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.linear import TorchLinearOps
from tests.checkpoints import make_checkpoint
from tests.quantizers import SCHEMES, Floats, Scheme, bf16, quantize_checkpoint, write_safetensors
from tests.stored_weights import quantized_weight
from tests.unit.worker.model.test_sharded_models import MXFP4, in_mxfp4, on_ranks
from tests.unit.worker.weights.test_quantized_weights import logits, stacked, write_config
from worker.config.model_config import ModelConfig
from worker.weights.checkpoint import Weights, load_weights
from worker.weights.stored_tensors import MatrixPart, QuantizedTensor

NAME = "model.layers.0.mlp.down_proj.weight"
ROWS = (slice(None), slice(0, 40), slice(128, 140), slice(37, 150), slice(140, 140))
COLUMNS = (slice(None), slice(128, 256), slice(256, 384), slice(0, 0))
SHAPE = (150, 416)


def set_keeps(monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    for backend in (TorchBackend, CpuBackend):
        monkeypatch.setattr(backend, "keeps_quantized", lambda *_: keeps)


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    set_keeps(monkeypatch, True)


def loaded(folder: Path, scheme: Scheme, shape: tuple[int, int] = SHAPE) -> tuple[Weights, Floats]:
    drawn = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    stored, worth = scheme.quantize(NAME, drawn)
    write_safetensors(folder / "model.safetensors", stored)
    config = ModelConfig.from_folder(write_config(folder, scheme.config)).quant_config
    return load_weights(folder, {NAME: shape}, quantization=config), worth


@pytest.mark.parametrize("name", list(SCHEMES))
def test_parts_equal_dequantized_parts(tmp_path: Path, name: str) -> None:
    weights, worth = loaded(tmp_path, SCHEMES[name])
    tensor = weights.quantized(NAME)
    assert isinstance(tensor, QuantizedTensor)
    for rows, columns in product(ROWS, COLUMNS):
        part = MatrixPart(NAME, rows, columns)
        assert tensor.refusal(part) is None
        taken = weights.take_quantized(part)
        assert isinstance(taken, QuantizedWeight)
        assert taken.numbers.element_size() == 1
        assert taken.quant_type == tensor.part_quant_type(part)
        assert taken.shape[0] == tensor.part_rows(part)
        assert np.array_equal(as_floats(taken).numpy(), worth[rows, columns]), part
    assert weights.use.kept == {NAME}
    assert not weights.use.dequantized


@pytest.mark.parametrize(
    ("name", "fits", "cuts"),
    [
        ("deepseek", slice(128, 384), slice(64, 192)),
        ("deepseek", slice(0, 256), slice(0, 208)),
        ("compressed-tensors-fp8-group", slice(0, 128), slice(208, 416)),
        ("quark-mxfp4", slice(32, 96), slice(16, 48)),
        ("w8a8-fp8", slice(3, 5), None),
    ],
)
def test_columns_must_not_split_scale_groups(tmp_path: Path, name: str, fits: slice, cuts: slice | None) -> None:
    weights, worth = loaded(tmp_path, SCHEMES[name])
    taken = weights.take_quantized(MatrixPart(NAME, columns=fits))
    assert np.array_equal(as_floats(taken).numpy(), worth[:, fits])
    if cuts is not None:
        with pytest.raises(ValueError, match=r"down_proj\.weight: \d+ columns of each rank cut groups of"):
            weights.take_quantized(MatrixPart(NAME, columns=cuts))


def test_mxfp4_has_whole_groups_only(tmp_path: Path) -> None:
    """No back end packs others."""
    weights, worth = loaded(tmp_path, SCHEMES["quark-mxfp4"], (40, 48))
    for columns in (slice(None), slice(0, 32)):
        with pytest.raises(ValueError, match="48 columns end in less than a group of 32"):
            weights.take_quantized(MatrixPart(NAME, columns=columns))
    assert np.array_equal(weights.take(NAME, dtype=torch.float32).numpy(), worth)


@pytest.mark.parametrize(
    ("rows", "size", "quant_type"),
    [(320, 2, "per_1x128"), (384, 3, "per_128x128"), (512, 2, "per_128x128"), (150, 1, "per_128x128")],
)
def test_ranks_have_one_granularity(tmp_path: Path, rows: int, size: int, quant_type: str) -> None:
    """Else they would choose other kernels; also where only the second rank's rows begin within a block."""
    weights, _ = loaded(tmp_path, SCHEMES["deepseek"], (rows, 256))
    share = rows // size
    parts = [MatrixPart(NAME, slice(rank * share, (rank + 1) * share)) for rank in range(size)]
    taken = [weights.take_quantized(part) for part in parts]
    assert [each.quant_type for each in taken if isinstance(each, QuantizedWeight)] == [quant_type] * size


def test_taken_weights_are_copied_from_file(tmp_path: Path) -> None:
    """Its pages are let go of, and may change: here they do."""
    scheme = SCHEMES["deepseek"]
    weights, worth = loaded(tmp_path, scheme)
    taken = weights.take_quantized(MatrixPart(NAME))
    (tmp_path / "model.safetensors").write_bytes(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert np.array_equal(as_floats(taken).numpy(), worth)


def test_float_tensor_has_no_stored_numbers(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {NAME: ("F32", np.ones(SHAPE, np.float32))})
    weights = load_weights(tmp_path, {NAME: SHAPE})
    assert weights.quantized(NAME) is None
    with pytest.raises(ValueError, match="stored as floats"):
        weights.take_quantized(MatrixPart(NAME))


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_one_tensor(tmp_path: Path, transposed: bool) -> None:
    """Which are stored as products want them, as gpt-oss's are, or the other way round."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored, worth = stacked(MXFP4, (3, 150, 160))
    shape: tuple[int, ...] = (3, 160, 150)
    if transposed:
        dtype, blocks = stored[f"{name}_blocks"]
        stored[f"{name}_blocks"] = (dtype, blocks.reshape(3, 150, 5, 16))
    else:
        stored, worth = stacked(SCHEMES["deepseek"], (3, 160, 150))
        shape = (3, 160, 150)
    write_safetensors(tmp_path / "model.safetensors", stored)
    config = LayerQuantConfig("per_1x32", "fp4x2") if transposed else LayerQuantConfig("per_128x128", "fp8")
    weights = load_weights(tmp_path, {name: shape}, quantization=QuantizationConfig(config))
    part = MatrixPart(name, slice(20, 60), slice(32, 128), 1, transposed=True)
    if not transposed:
        with pytest.raises(ValueError, match="stored transposed"):
            weights.take_quantized(part)
        return
    taken = weights.take_quantized(part)
    assert np.array_equal(as_floats(taken).numpy(), worth[1, 20:60, 32:128])
    assert isinstance(taken, QuantizedWeight)
    alternating = selected_rows(taken, slice(0, None, 2), slice(1, None, 2))
    assert np.array_equal(
        as_floats(alternating).numpy(), np.concatenate([worth[1, 20:60:2, 32:128], worth[1, 21:60:2, 32:128]])
    )


def weight_of(scheme: str, rows: int) -> tuple[QuantizedWeight, torch.Tensor]:
    drawn = torch.randn(rows, 288, generator=torch.Generator().manual_seed(rows)) * rows
    return quantized_weight(scheme, drawn)


@pytest.mark.parametrize(
    ("scheme", "rows", "quant_type"),
    [
        ("deepseek", (128, 256, 40), "per_128x128"),
        ("deepseek", (128, 40, 128), "per_1x128"),
        ("fp8-per-tensor", (40, 33), "per_token"),
        ("w8a8-int8", (40, 33), "per_token"),
        ("compressed-tensors-fp8-group", (40, 33), "per_1x128"),
        ("quark-mxfp4", (40, 33), "per_1x32"),
    ],
)
def test_weights_below_each_other(scheme: str, rows: tuple[int, ...], quant_type: str) -> None:
    pairs = [weight_of(scheme, count) for count in rows]
    joined = joined_weights([weight for weight, _ in pairs])
    assert joined.quant_type == quant_type
    assert torch.equal(as_floats(joined), torch.cat([worth for _, worth in pairs]))


def test_blocks_go_with_groups_and_not_with_rows() -> None:
    blocks, groups, rows = (
        weight_of(name, 128) for name in ("deepseek", "compressed-tensors-fp8-group", "fp8-per-tensor")
    )
    joined = joined_weights([blocks[0], groups[0]])
    assert torch.equal(as_floats(joined), torch.cat([blocks[1], groups[1]]))
    with pytest.raises(ValueError, match="per_128x128, per_token do not go below each other"):
        joined_weights([blocks[0], rows[0]])


def use_of(folder: Path, **given: Any) -> tuple[torch.Tensor, MutableMapping[str, Any]]:
    """The logits, and the line that says what became of the quantized tensors."""
    with capture_logs() as lines:
        found = logits(folder, kernels="torch", **given)
    (line,) = (each for each in lines if each["event"] == "quantized weights")
    return found, line


def made(folder: Path, architecture: str, scheme: str, **shape: Any) -> Path:
    make_checkpoint(folder, architecture, tokenizer=False, **{"num_hidden_layers": 1} | shape)
    quantize_checkpoint(folder, SCHEMES[scheme])
    return folder


@pytest.mark.parametrize(
    ("architecture", "scheme", "kept", "dequantized", "shape"),
    [
        ("qwen3", "deepseek", 7, 0, {"hidden_size": 160, "intermediate_size": 288, "head_dim": 48}),
        ("qwen3", "fp8-per-tensor", 7, 0, {}),
        ("llama", "compressed-tensors-int8-channel", 7, 0, {"attention_bias": True, "mlp_bias": True}),
        ("qwen3_moe", "quark-mxfp4", 4 + 7 * 2, 0, {"hidden_size": 96}),
        ("mixtral", "compressed-tensors-fp8-block", 4 + 5 * 3, 0, {"hidden_size": 160}),
        # Two layers, the first dense; kv_b_proj is absorbed, the weights of an indexer are float32.
        ("deepseek_v3", "deepseek", 2 * 4 + 3 + 9 * 3, 2, {"hidden_size": 160, "num_hidden_layers": 2}),
        ("deepseek_v32", "deepseek", 2 * 6 + 3 + 9 * 3, 4, {"hidden_size": 160, "num_hidden_layers": 2}),
    ],
)
def test_models_have_equal_bits(
    tmp_path: Path,
    keeps_all: None,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    scheme: str,
    kept: int,
    dequantized: int,
    shape: dict[str, Any],
) -> None:
    folder = made(tmp_path, architecture, scheme, **shape)
    found, line = use_of(folder)
    assert (line["kept"], line["dequantized"]) == (kept, dequantized), line
    set_keeps(monkeypatch, False)
    expected, line = use_of(folder)
    assert (line["kept"], line["dequantized"]) == (0, kept + dequantized)
    assert "kernels 'torch' do not multiply" in line["reasons"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("size", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_gpt_oss(
    tmp_path: Path, keeps_all: None, monkeypatch: pytest.MonkeyPatch, size: int, expert_parallel: bool
) -> None:
    folder = make_checkpoint(tmp_path / "model", "gpt_oss", tokenizer=False, num_hidden_layers=2)
    in_mxfp4(folder, tmp_path / "worth")
    with capture_logs() as lines:
        found = on_ranks(folder, size, expert_parallel)
    assert [(line["kept"], line["dequantized"]) for line in lines if line["event"] == "quantized weights"] == [
        (4, 0)
    ] * size
    set_keeps(monkeypatch, False)
    for one, other in zip(found, on_ranks(folder, size, expert_parallel), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("inner", "cut"), [(512, False), (320, True)])
def test_parts_of_ranks(
    tmp_path: Path, keeps_all: None, monkeypatch: pytest.MonkeyPatch, inner: int, cut: bool
) -> None:
    """Parts on the borders of blocks are kept; otherwise both ranks dequantize the columns that they split."""
    folder = made(tmp_path, "qwen3", "deepseek", intermediate_size=inner, hidden_size=256, head_dim=64)
    with capture_logs() as lines:
        found = on_ranks(folder, 2, False)
    used = [line for line in lines if line["event"] == "quantized weights"]
    assert [(line["kept"], line["dequantized"]) for line in used] == ([(6, 1)] if cut else [(7, 0)]) * 2
    assert all(("160 columns of each rank cut groups of 128: 1" in line["reasons"]) == cut for line in used)
    set_keeps(monkeypatch, False)
    for one, other in zip(found, on_ranks(folder, 2, False), strict=True):
        assert torch.equal(one, other)


def test_excluded_projection_and_its_joined_ones_stay_floats(tmp_path: Path, keeps_all: None) -> None:
    """The others stay as they are."""
    folder = make_checkpoint(tmp_path / "model", tokenizer=False, num_hidden_layers=1)
    scheme = SCHEMES["w8a8-int8"]
    excluded = Scheme({**scheme.config, "ignored_layers": ["k_proj"]}, scheme.block, scheme.number)
    quantize_checkpoint(folder, excluded, lambda name: "k_proj" not in name)
    _, line = use_of(folder)
    assert (line["kept"], line["dequantized"]) == (4, 2)
    assert line["reasons"].startswith("a part of the product is stored as floats: 2, such as model.layers.0.self_attn.")


def test_quantize_overrides_stored_format(tmp_path: Path, keeps_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, "qwen3", "w8a8-fp8")
    asked: list[PackedFormat | None] = []
    pack = TorchLinearOps.pack

    def remembered(self: TorchLinearOps, weight: Any, bias: Any, dtype: Any, packed_format: Any = None) -> Any:
        assert isinstance(weight, torch.Tensor)
        asked.append(packed_format)
        return pack(self, weight, bias, dtype)

    monkeypatch.setattr(TorchBackend, "packed_format", lambda *_: PackedFormat(torch.int8))
    monkeypatch.setattr(TorchLinearOps, "pack", remembered)
    _, line = use_of(folder, quantize="int8")
    assert (line["kept"], line["dequantized"]) == (0, 7)
    assert line["reasons"].startswith("quantize asks for other numbers: 7")
    assert set(asked) == {PackedFormat(torch.int8)}


def test_stored_weights_dequantize_to_model_dtype(tmp_path: Path) -> None:
    """As before there was another way."""
    weights, worth = loaded(tmp_path, SCHEMES["deepseek"])
    taken = weights.take(NAME, dtype=torch.bfloat16)
    assert np.array_equal(taken.float().numpy(), bf16(worth)[1])
    assert weights.use.dequantized == {NAME: "the model wants floats"}
