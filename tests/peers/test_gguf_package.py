"""The real `gguf` package of llama.cpp's authors: values of each type, and places of the tensors in a file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.quantized_weight import as_floats
from tests.checkpoints import make_checkpoint
from tests.gguf_files import FACTORS, QUANTIZED, TYPES, convert
from tests.peers.environment import peer_environment, peer_variables
from worker.config.gguf_file import read_gguf
from worker.weights.gguf_tensors import gguf_weight

pytestmark = pytest.mark.long

PACKAGES = ("gguf==0.19.0",)
DEQUANTIZE = """
import sys, numpy
from gguf import GGMLQuantizationType, quants
kind, stored, values = sys.argv[1:]
numpy.save(values, quants.dequantize(numpy.load(stored), GGMLQuantizationType[kind]))
"""
LIST = """
import json, sys
from gguf import GGUFReader
tensors = GGUFReader(sys.argv[1]).tensors
print(json.dumps([[t.name, t.tensor_type.name, t.shape.tolist()[::-1], int(t.data_offset)] for t in tensors]))
"""


def run(script: str, *arguments: str | Path) -> str:
    """Runs a script with the package; returns its output."""
    command: list[str | Path] = [peer_environment("gguf", PACKAGES) / "python", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=peer_variables(), check=True)
    return done.stdout


@pytest.mark.parametrize("kind", QUANTIZED)
def test_values_equal_those_of_the_package(tmp_path: Path, kind: str) -> None:
    """Bit for bit, of blocks of random bytes with finite factors."""
    rng = np.random.default_rng(11)
    _, numbers, size = TYPES[kind]
    blocks = rng.integers(0, 256, (16, 1024 // numbers, size), dtype=np.uint8)
    for place in FACTORS[kind]:
        factors = rng.normal(size=(*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = factors.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] %= 252
    stored = blocks.reshape(16, -1)
    np.save(tmp_path / "stored.npy", stored)
    run(DEQUANTIZE, kind, tmp_path / "stored.npy", tmp_path / "values.npy")
    ours = as_floats(gguf_weight(torch.from_numpy(stored), kind)).numpy()
    assert np.array_equal(ours, np.load(tmp_path / "values.npy"))


def test_places_equal_those_of_the_package(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(convert(make_checkpoint(tmp_path, "llama", num_hidden_layers=1), "Q8_0").to_bytes())
    tensors = read_gguf([file]).tensors
    expected = [[name, one.type, list(one.shape), one.offset] for name, one in tensors.items()]
    assert sorted(json.loads(run(LIST, file))) == sorted(expected)
