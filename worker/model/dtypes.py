"""Choice of dtypes: of weights and activations, and of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog
import torch

from common.config import QUANTIZE_NO
from kernels.interface import KernelBackend, PackedFormat
from worker.config.model_config import ModelConfig, ModelError
from worker.config.stored_names import stored_names
from worker.weights.tensor_index import KV_SCALE_SUFFIXES, some

_log = structlog.get_logger(__name__)

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
AUTO = "auto"
# Entries of `quantization_config` for a quantized KV cache: compressed-tensors' and Quark's.
_KV_SETTINGS: Final = ("kv_cache_scheme", "kv_cache_quant_config")


def resolve_dtype(name: str, model_config: ModelConfig, kernels: KernelBackend) -> torch.dtype:
    """The dtype for `Config.dtype`: `auto` is the checkpoint's, or float32 if `kernels` are slow with that one.

    bfloat16 replaces float16 for a GGUF file: llama.cpp stores weights of any model in float16 and computes activations
    in float32. Activations of Gemma 2 and 3, gpt-oss and DeepSeek-V2 overflow float16.
    """
    if name != AUTO:
        return _BY_NAME[name]
    own = _BY_NAME[model_config.dtype]
    if kernels.is_fast(own):
        return torch.bfloat16 if own == torch.float16 and "gguf_sampling" in model_config.source else own
    _log.info("no fast kernels for the checkpoint's dtype here, float32 is used", dtype=model_config.dtype)
    return torch.float32


# Packs weights as Config.quantize says.
_NEEDED = {
    "int8": "kernels 'cpu' and dtype float32 or bfloat16, or kernels of a GPU",
    "int4": "kernels 'cpu' and dtype float32 or bfloat16, or kernels of a GPU",
    "fp8": "kernels of a GPU that has FP8",
    "w8a8_int8": "kernels of a GPU",
    "w8a8_fp8": "kernels of a GPU that has FP8",
}


def resolve_packed_format(name: str, dtype: torch.dtype, kernels: KernelBackend) -> PackedFormat | None:
    """Packed format of the weights for `Config.quantize`; None for unpacked weights in the model's dtype.

    Raises:
        ModelError: the kernels do not support it with this dtype.
    """
    if name == QUANTIZE_NO:
        return None
    packed = kernels.packed_format(name, dtype)
    if packed is None:
        found = f"kernels {kernels.name!r} and dtype {str(dtype).removeprefix('torch.')}"
        raise ModelError(f"quantize {name!r} needs {_NEEDED[name]}; here are {found}")
    return packed


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the KV cache for `Config.kv_cache_dtype`: `auto` is the model's."""
    return dtype if name == AUTO else _BY_NAME[name]


def warn_of_kv_scales(folder: Path, source: Mapping[str, Any], kv_dtype: torch.dtype) -> None:
    """Logs one warning if a checkpoint has calibrated scales of the KV cache. No kernel uses them: all scales are 1.

    Args:
        folder: the checkpoint's folder.
        source: content of its config.json.
        kv_dtype: dtype of the KV cache.
    """
    names = sorted(name for name in stored_names(folder) if name.endswith(KV_SCALE_SUFFIXES))
    quantization = source.get("quantization_config")
    settings = [name for name in _KV_SETTINGS if isinstance(quantization, Mapping) and quantization.get(name)]
    if names or settings:
        _log.warning(
            "calibrated scales of the KV cache are not used",
            tensors=len(names),
            such_as=some(names),
            settings=settings,
            kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
            scale=1,
        )
