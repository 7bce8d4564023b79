"""Seconds and peak memory of loading a 1.2 GB checkpoint: `python -m tests.bench.load_checkpoint [--dtype bfloat16]`.

Each load is a process of its own, one after the other, with the file in the page cache. Memory is the growth of the
resident set over that of the process before the load, PyTorch and all modules imported; pages of the mapped file count.

`--cache` measures packed weights instead: the first start, which packs and writes, later ones, which map, and what two
processes that run at the same time take: their proportional set sizes (`Pss` of /proc/PID/smaps_rollup) after a step of
each, with the cache and without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import worker  # noqa: F401  (settings that must precede torch)

# isort: split
import torch
from safetensors.torch import save_file

from common.config import Config
from tests.shapes import QWEN3_0_6B
from worker.config.model_config import ModelConfig
from worker.model.model_runner import ModelRunner
from worker.model.models.qwen3 import Qwen3ForCausalLM
from worker.model.runner_setup import warm_up
from worker.model.sharding import Shard

SHAPE: dict[str, Any] = {
    **QWEN3_0_6B,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
FILE_BYTES = 400_000_000
MIB = 1 << 20


def write_checkpoint(folder: Path) -> None:
    """Random bfloat16 weights in files of about FILE_BYTES; existing files are kept."""
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
    return ModelRunner(
        Config(model=str(folder), kernels="cpu", dtype=dtype), ModelConfig.from_folder(folder), shard=shard
    )


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


def start(folder: Path, dtype: str, cache: Path | None, hold: bool) -> None:
    """Loads and computes a step in this process; prints seconds and, when asked for by a line of input, Pss."""
    config = Config(model=str(folder), kernels="cpu", dtype=dtype, weights_cache="" if cache is None else str(cache))
    before = _pss()
    began = time.perf_counter()
    runner = ModelRunner(config, ModelConfig.from_folder(folder))
    loaded = time.perf_counter() - began
    warm_up(runner)
    print(f"loaded {loaded:5.2f} s, with a first step {time.perf_counter() - began:5.2f} s", flush=True)
    if hold:
        input()
        print(f"Pss grew by {(_pss() - before) // MIB} MiB", flush=True)
        input()


def measure_cache(folder: Path, dtype: str, runs: int) -> None:
    """The first start, later starts, and two at a time without and with the cache."""
    command = [
        sys.executable,
        "-m",
        "tests.bench.load_checkpoint",
        "--folder",
        str(folder),
        "--dtype",
        dtype,
        "--start",
    ]
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        with_cache = [*command, "--weights-cache", cache]
        for name, one in (("no cache", command), ("first start", with_cache), ("later start", with_cache)):
            for _ in range(1 if name == "first start" else runs):
                print(name, flush=True)
                subprocess.run(one, check=True)
        for name, one in (("no cache", command), ("cache", with_cache)):
            print(f"two processes, {name}", flush=True)
            _two_at_a_time([*one, "--hold"])


def _two_at_a_time(command: list[str]) -> None:
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        while "loaded" not in process.stdout.readline():
            pass
    for process in both:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        print(" ", process.stdout.readline().strip())
    for process in both:
        process.communicate("\n")


def _pss() -> int:
    return int(Path("/proc/self/smaps_rollup").read_text("ascii").split("Pss:")[1].split()[0]) << 10


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
    parser.add_argument("--cache", action="store_true", help="measure packed weights")
    parser.add_argument("--start", action="store_true", help="one start, in this process")
    parser.add_argument("--weights-cache", type=Path, help="with --start: the folder; absent: none")
    parser.add_argument("--hold", action="store_true", help="with --start: stay until a line of input")
    options = parser.parse_args()
    if options.start:
        start(options.folder, options.dtype, options.weights_cache, options.hold)
        return
    if options.loader:
        measure(options.loader, options.folder, options.dtype)
        return
    write_checkpoint(options.folder)
    for file in options.folder.glob("*.safetensors"):
        file.read_bytes()
    if options.cache:
        measure_cache(options.folder, options.dtype, options.runs)
        return
    for _ in range(options.runs):
        for loader in LOADERS:
            arguments = ("--loader", loader, "--folder", str(options.folder), "--dtype", options.dtype)
            subprocess.run([sys.executable, "-m", "tests.bench.load_checkpoint", *arguments], check=True)


if __name__ == "__main__":
    main()
