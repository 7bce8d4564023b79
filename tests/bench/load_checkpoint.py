"""Seconds and peak memory of loading a 1.2 GB checkpoint: `python -m tests.bench.load_checkpoint [--dtype bfloat16]`.

Each load is a process of its own, one after the other, with the file in the page cache. Memory is the growth of the
resident set over that of the process before the load, PyTorch and all modules imported; pages of the mapped file count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from safetensors.torch import save_file

from common.config import Config
from worker.model_config import ModelConfig
from worker.model_runner import ModelRunner
from worker.models.qwen3 import Qwen3ForCausalLM
from worker.parallel import Shard

# Qwen3-0.6B's shape: 596 M parameters.
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
FILE_BYTES = 400_000_000
MIB = 1 << 20


def write_checkpoint(folder: Path) -> None:
    """Random bfloat16 weights in files of about FILE_BYTES; nothing if they are there already."""
    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(weight_map.values())):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        tensors.clear()

    for name, shape in Qwen3ForCausalLM.tensor_shapes(ModelConfig.from_folder(folder)).items():
        tensors[name] = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        if sum(tensor.nbytes for tensor in tensors.values()) > FILE_BYTES:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load_here(folder: Path, dtype: str, shard: Shard) -> object:
    """One rank's part of the model."""
    return ModelRunner(Config(model=str(folder), dtype=dtype), ModelConfig.from_folder(folder), shard=shard)


def load_transformers(folder: Path, dtype: str) -> object:
    """The model by `from_pretrained`, each page touched: in the checkpoint's dtype it only maps the file."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    for weight in model.parameters():
        weight.detach().view(-1).view(torch.uint8)[::4096].sum()
    return model


LOADERS: dict[str, Callable[[Path, str], object]] = {
    "one rank": lambda folder, dtype: load_here(folder, dtype, Shard()),
    "rank 0 of 2": lambda folder, dtype: load_here(folder, dtype, Shard(0, 2)),
    "transformers": load_transformers,
}


def measure(loader: str, folder: Path, dtype: str) -> None:
    """Loads in this process; prints MiB at most, MiB at the end and seconds."""
    if loader == "transformers":
        from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401  (not part of the load)
    # Begins a new VmHWM, see proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    start = time.perf_counter()
    model = LOADERS[loader](folder, dtype)
    seconds = time.perf_counter() - start
    peak, kept = _status("VmHWM") - before, _status("VmRSS") - before
    print(f"{loader:13} {dtype:9} peak {peak // MIB:5} MiB, kept {kept // MIB:5} MiB, {seconds:5.2f} s")
    del model


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    return int(Path("/proc/self/status").read_text("ascii").split(f"{name}:")[1].split()[0]) << 10


def main() -> None:
    """Writes the checkpoint once, then loads it in every way, `--runs` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/fissile-bench-checkpoint"))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--loader", choices=LOADERS, help="only this one, in this process")
    options = parser.parse_args()
    if options.loader:
        measure(options.loader, options.folder, options.dtype)
        return
    write_checkpoint(options.folder)
    for file in options.folder.glob("*.safetensors"):
        file.read_bytes()
    for _ in range(options.runs):
        for loader in LOADERS:
            arguments = ("--loader", loader, "--folder", str(options.folder), "--dtype", options.dtype)
            subprocess.run([sys.executable, "-m", "tests.bench.load_checkpoint", *arguments], check=True)


if __name__ == "__main__":
    main()
