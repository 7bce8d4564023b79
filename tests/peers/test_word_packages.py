"""Codes in words as the real packages dequantize them: AutoGPTQ, AutoAWQ and compressed-tensors.

They run in float32 here, because in the dtype of the scales they round each weight.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import torch

from tests.peers.environment import peer_environment, peer_variables
from tests.unit.worker.weights.test_word_checkpoints import LAYER, NAME, drawn, weights_of, write
from tests.word_checkpoints import WORD_SCHEMES

pytestmark = pytest.mark.long

PACKAGES: Final = ("loguru==0.7.3", "psutil==7.2.2")
BARE: Final = ("auto-gptq==0.7.1", "autoawq==0.2.7.post3", "compressed-tensors==0.20.0")
SHAPE: Final = (160, 256)
# AutoGPTQ has only the first version of its zero points, and compressed-tensors leaves the order of columns to vLLM.
NAMES: Final = [name for name, each in WORD_SCHEMES.items() if each.method != "gptq_v2" and "tensors-act" not in name]
DEQUANTIZE: Final = """
import importlib.util, json, sys, numpy, torch

def module(place):
    name, _, path = place.partition("/")
    root = importlib.util.find_spec(name).submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location(name + "_part", root + "/" + path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made

source, target, config, rows, columns = sys.argv[1:]
config, rows, columns = json.loads(config), int(rows), int(columns)
stored = {name.rpartition(".")[2]: tensor for name, tensor in torch.load(source).items()}
stored = {name: each.float() if each.is_floating_point() else each for name, each in stored.items()}
if config["quant_method"] == "gptq":
    linear = module("auto_gptq/nn_modules/qlinear/qlinear_cuda.py").QuantLinear(
        config["bits"], config["group_size"], columns, rows, False, weight_dtype=torch.float32
    )
    linear.load_state_dict(stored)
    values = linear(torch.eye(columns)).t()
elif config["quant_method"] == "awq":
    group = config["group_size"] if config["group_size"] > 0 else columns
    unpack = module("awq/utils/packing_utils.py").dequantize_gemm
    values = unpack(stored["qweight"], stored["qzeros"], stored["scales"], config["bits"], group).t()
else:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    given = config["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given))
    values = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
assert values.dtype == torch.float32
numpy.save(target, values.numpy())
"""


@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_those_of_the_package(tmp_path: Path, name: str) -> None:
    scheme = WORD_SCHEMES[name]
    stored, _ = scheme.quantize(LAYER, drawn(*SHAPE))
    ours = weights_of(write(tmp_path, scheme, stored), SHAPE).take(NAME).numpy()
    tensors = {key: torch.from_numpy(array.copy()) for key, (_, array) in stored.items()}
    # numpy has no bfloat16: its bits are there as whole numbers.
    halves = {key: tensor.view(torch.bfloat16) for key, tensor in tensors.items() if stored[key][0] == "BF16"}
    torch.save(tensors | halves, tmp_path / "stored.pt")
    (packages,) = (peer_environment("words", PACKAGES, BARE).parent / "lib").glob("python*/site-packages")
    files: list[str | Path] = [tmp_path / "stored.pt", tmp_path / "values.npy", json.dumps(scheme.config)]
    command = [sys.executable, "-c", DEQUANTIZE, *files, *map(str, SHAPE)]
    variables = peer_variables() | {"PYTHONPATH": str(packages)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert np.array_equal(ours, np.load(tmp_path / "values.npy"))
