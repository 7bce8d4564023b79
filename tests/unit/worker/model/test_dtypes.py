"""Warnings about a checkpoint's calibrated KV cache scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from worker.model.dtypes import warn_of_kv_scales

LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("names", "quantization", "tensors", "settings"),
    [
        ((f"{LAYER}.k_scale", f"{LAYER}.v_scale", f"{LAYER}.q_scale"), {}, 3, []),
        ((f"{LAYER}.k_proj.output_scale", f"{LAYER}.v_proj.output_scale", f"{LAYER}.o_proj.output_scale"), {}, 2, []),
        ((f"{LAYER}.kv_scale",), {"kv_cache_scheme": {"num_bits": 8}}, 1, ["kv_cache_scheme"]),
        ((), {"kv_cache_scheme": {"num_bits": 8}}, 0, ["kv_cache_scheme"]),
    ],
)
def test_calibrated_scales_of_the_kv_cache_log_their_names_once(
    tmp_path: Path, names: tuple[str, ...], quantization: dict[str, Any], tensors: int, settings: list[str]
) -> None:
    """Former fault: the worker served a checkpoint with scales of 0.02 at scale 1, without a log line."""
    save_file({name: torch.ones(1) for name in (*names, f"{LAYER}.k_proj.weight")}, tmp_path / "model.safetensors")
    with capture_logs() as logs:
        warn_of_kv_scales(tmp_path, {"quantization_config": quantization}, torch.float8_e4m3fn)
    (line,) = logs
    assert line["event"] == "calibrated scales of the KV cache are not used"
    assert (line["log_level"], line["tensors"], line["settings"]) == ("warning", tensors, settings)
    assert (line["kv_cache_dtype"], line["scale"]) == ("float8_e4m3fn", 1)


@pytest.mark.parametrize("source", [{}, {"quantization_config": {"kv_cache_scheme": None}}, {"quantization_config": 5}])
def test_checkpoint_without_scales_logs_no_warning(tmp_path: Path, source: dict[str, Any]) -> None:
    save_file({f"{LAYER}.k_proj.input_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    with capture_logs() as logs:
        warn_of_kv_scales(tmp_path, source, torch.bfloat16)
    assert logs == []
