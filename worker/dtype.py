"""Which dtype weights and activations have, and which the KV cache."""

from __future__ import annotations

import structlog
import torch

from worker.model_config import ModelConfig

_log = structlog.get_logger(__name__)

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
AUTO = "auto"


def resolve_dtype(name: str, model_config: ModelConfig) -> torch.dtype:
    """The dtype for `Config.dtype`: `auto` is the checkpoint's, or float32 where the CPU computes that one slowly."""
    if name == AUTO:
        own = _BY_NAME[model_config.dtype]
        return own if _is_fast(own) else torch.float32
    return _BY_NAME[name]


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache for `Config.kv_cache_dtype`: `auto` is the model's."""
    return dtype if name == AUTO else _BY_NAME[name]


def log_dtype(name: str, model_config: ModelConfig, dtype: torch.dtype) -> None:
    """Says it when `auto` does not take the checkpoint's dtype."""
    if name == AUTO and dtype is not _BY_NAME[model_config.dtype]:
        _log.info("this CPU has no instructions for the checkpoint's dtype, float32 is used", dtype=model_config.dtype)


def _is_fast(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies `dtype` natively; without, PyTorch's bfloat16 is ten times slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    needed = {torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16"), torch.float16: ("avx512_fp16", "amx_fp16", "fp16")}
    return dtype == torch.float32 or any(capabilities.get(name, False) for name in needed[dtype])
