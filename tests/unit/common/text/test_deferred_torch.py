"""`transformers` config classes load without PyTorch, and PyTorch works normally afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

READS = """
import sys
from common.text.deferred_torch import deferred_torch
from worker.config.transformers_config import read_settings

settings = read_settings({"hidden_size": 8, "dtype": "bfloat16"}, "qwen3")
assert settings["hidden_size"] == 8, settings
assert "torch" not in sys.modules
"""
WITHOUT = """
import sys
sys.modules["torch"] = None
from worker.config.transformers_config import is_of_other_model, read_settings

assert is_of_other_model("mistral", "llama")
assert read_settings({"pad_token_id": -1, "rope_scaling": {"type": "yarn", "factor": 0.5}}, "llama")
"""
USES = {
    "nothing": "",
    "a model of transformers": """
from transformers import Qwen3Config, Qwen3ForCausalLM
import torch

shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 8}
config = Qwen3Config(
    vocab_size=16, hidden_size=8, intermediate_size=8, max_position_embeddings=16, rope_parameters=yarn, **shape
)
assert Qwen3ForCausalLM(config)(torch.tensor([[1, 2]])).logits.shape == (1, 2, 16)
""",
    "an import while it is deferred": """
with deferred_torch():
    import torch
    from torch import nn

    assert torch.ones(2).sum() == 2.0
import torch as real

assert sys.modules["torch"] is real and real.nn is nn and real.ones(1) == 1.0
with deferred_torch():
    import torch

assert torch is real
""",
    "an import that fails": """
try:
    with deferred_torch():
        raise ImportError
except ImportError:
    pass
import torch

assert torch.__version__ and torch.nn.Linear
""",
}


@pytest.mark.parametrize(
    "use",
    [pytest.param(use, marks=() if use == "an import while it is deferred" else pytest.mark.slow) for use in USES],
)
def test_deferred_torch_loads_on_first_use(use: str) -> None:
    run = subprocess.run([sys.executable, "-c", READS + USES[use]], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.slow
def test_config_classes_without_torch_print_no_warning() -> None:
    """Without PyTorch `transformers` prints install advice and warnings about entries that the worker checks."""
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


TWO_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from common.text.tokenizer_reading import import_transformers

with ThreadPoolExecutor(2) as pool:
    for done in [pool.submit(import_transformers) for _ in range(2)]:
        done.result()
"""


def test_two_threads_may_import_transformers_at_once() -> None:
    run = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
