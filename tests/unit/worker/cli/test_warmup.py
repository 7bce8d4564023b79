"""`fissile worker warmup`: an engine on a model of which there is only config.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from common.cli.core.errors import CommandError
from tests.checkpoints import ARCHITECTURES, DEFAULT_SHAPE
from tests.covering import slow_but
from tests.quantizers import SCHEMES
from tests.word_checkpoints import WORD_SCHEMES
from worker.cli.warmup import blank_checkpoint, num_layers, require_jit_folder, works
from worker.cli.worker import worker
from worker.config.model_config import ModelConfig, ModelError
from worker.llm_engine import LLMEngine
from worker.model.models.qwen3 import Qwen3ForCausalLM
from worker.model.models.qwen3_moe import Qwen3MoeForCausalLM
from worker.weights.checkpoint import load_weights
from worker.weights.safetensors_file import read_entries

ROOT = Path(__file__).resolve().parents[4]
SMALL = ["--kernels", "torch", "--max-num-batched-tokens", "48", "--max-num-seqs", "4", "--max-model-len", "64"]


def config_only(folder: Path, architecture: str, **shape: Any) -> Path:
    """A folder with config.json."""
    prefix, own = ARCHITECTURES[architecture]
    entries = {**DEFAULT_SHAPE, **own, "architectures": [f"{prefix}ForCausalLM"], **shape}
    folder = folder / "config-only"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entries), "utf-8")
    return folder


def quantization_config(scheme: str) -> Any:
    if scheme == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return SCHEMES[scheme].config if scheme in SCHEMES else WORD_SCHEMES[scheme].config


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "common.cli.main", "worker", "warmup", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_warmup_command_prints_its_steps(tmp_path: Path) -> None:
    folder = config_only(tmp_path, "qwen3")
    result = run("--model", str(folder), *SMALL)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"model: 2 layers of {folder} with weights of zero"
    assert lines[1].startswith("engine: ")
    assert [line.partition(":")[0] for line in lines[2:]] == [
        "prompt of 48 tokens",
        "4 answers at once",
        "4 sampled answers at once",
    ]
    assert all(line.endswith(" s") and ": first " in line and " s, then " in line for line in lines[2:])


@pytest.mark.parametrize("architecture", slow_but({"qwen3", "gpt_oss", "deepseek_v32"}, list(ARCHITECTURES)))
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    folder = config_only(tmp_path, architecture, num_hidden_layers=5)
    blank = tmp_path / "blank"
    blank.mkdir()
    # The first layer with full attention is the third of Gemma's and the fourth of OLMo's.
    assert blank_checkpoint(blank, folder) == {"gemma3_text": 3, "olmo3": 4}.get(architecture, 2)
    assert (blank / "model.safetensors").stat().st_blocks * 512 < 1 << 16
    engine = LLMEngine(str(blank))
    (answer,) = engine.generate([[1, 2, 3]], {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True})
    assert answer["token_ids"] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Model", "ForSequenceClassification"])
def test_warmup_embeds_with_model_without_output_head(tmp_path: Path, end: str) -> None:
    source = config_only(tmp_path, "qwen3", architectures=[f"Qwen3{end}"])
    done = run("--model", str(source), *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("first ") == 3


@pytest.mark.slow
def test_missing_model_folder_is_refused(tmp_path: Path) -> None:
    result = run("--model", str(tmp_path / "nothing"), *SMALL)
    assert result.returncode == 2
    folder = tmp_path / "nothing"
    valid = "give a checkpoint folder, a GGUF file, or org/name on the Hub"
    assert result.stderr == f"error: {folder} does not exist; {valid}\n"


def test_kinds_of_layers_and_quantization(tmp_path: Path) -> None:
    folder = config_only(tmp_path, "gpt_oss", num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    config["layer_types"] = ["full_attention"] * 2 + ["sliding_attention"] * 2
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    blank = tmp_path / "blank"
    blank.mkdir()
    assert blank_checkpoint(blank, folder) == 3
    short = json.loads((blank / "config.json").read_text("utf-8"))
    assert short["quantization_config"] == config["quantization_config"]
    stored = {name: (entry.dtype, entry.shape) for name, entry in read_entries(blank / "model.safetensors").items()}
    experts = "model.layers.2.mlp.experts.down_proj"
    assert stored[f"{experts}_blocks"] == ("U8", (5, 64, 2, 16))
    assert stored[f"{experts}_scales"] == ("U8", (5, 64, 2))
    assert short["layer_types"] == ["full_attention", "full_attention", "sliding_attention"]
    (answer,) = LLMEngine(str(blank)).generate([[1, 2, 3]], {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True})
    assert answer["token_ids"] == [0, 0]


@pytest.mark.parametrize("scheme", [*SCHEMES, *(name for name in WORD_SCHEMES if "act-order" not in name), "nvfp4"])
def test_warmup_quantizes_quantized_model(tmp_path: Path, scheme: str) -> None:
    """All quantized weights of a checkpoint; the weights that the model needs as floats are dequantized."""
    folder = config_only(tmp_path, "qwen3_moe", moe_intermediate_size=64)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization_config(scheme)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    blank = tmp_path / "blank"
    blank.mkdir()
    blank_checkpoint(blank, folder)
    short = ModelConfig.from_folder(blank)
    weights = load_weights(blank, Qwen3MoeForCausalLM.tensor_shapes(short), quantization=short.quant_config)
    for layer in ("self_attn.q_proj", "mlp.experts.3.down_proj"):
        assert weights.quantized(f"model.layers.1.{layer}.weight") is not None
        assert not weights.take(f"model.layers.1.{layer}.weight").any()


def test_warmup_has_floats_for_codes_in_an_order(tmp_path: Path) -> None:
    """Zeros are no order of columns."""
    folder = config_only(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = WORD_SCHEMES["gptq-act-order"].config
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    blank = tmp_path / "blank"
    blank.mkdir()
    blank_checkpoint(blank, folder)
    short = ModelConfig.from_folder(blank)
    weights = load_weights(blank, Qwen3ForCausalLM.tensor_shapes(short), quantization=short.quant_config)
    assert weights.quantized("model.layers.1.self_attn.q_proj.weight") is None


def test_warmup_refuses_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}', "utf-8")
    with pytest.raises(ModelError, match="architecture not supported: Other"):
        blank_checkpoint(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("layers", "types", "expected"),
    [
        (["dense"], None, 1),
        (["dense"] * 4, None, 2),
        (["dense"] * 3 + ["experts"] * 4, None, 4),
        (["dense"] * 4, ["full", "full", "full", "sliding"], 4),
        (["dense", "experts"] * 3, None, 2),
    ],
)
def test_num_layers(layers: list[str], types: list[str] | None, expected: int) -> None:
    shapes = {f"model.layers.{i}.{kind}.weight": (2, 3) for i, kind in enumerate(layers)}
    assert num_layers({"model.norm.weight": (3,), **shapes}, types) == expected


def test_warmup_requests_fit_pool() -> None:
    prompt, answers, sampled = works(2048, 512, 1024, num_blocks=100, size=16)
    assert (prompt.length, prompt.params["max_tokens"]) == (1021, 3)
    assert (answers.prompts, answers.length) == (100, 8)
    assert sampled.params["temperature"] == 1.0
    tiny, *_ = works(2048, 512, 2, num_blocks=1, size=16)
    assert (tiny.length, tiny.params["max_tokens"]) == (1, 1)


def test_aiters_folder(tmp_path: Path) -> None:
    for kernels in ("torch", "cpu", "triton", "auto"):
        require_jit_folder(kernels, {})
    with pytest.raises(CommandError, match="AITER_JIT_DIR is not set: name a folder that stays"):
        require_jit_folder("aiter", {})
    folder = tmp_path / "jit" / "kernels"
    require_jit_folder("aiter", {"AITER_JIT_DIR": str(folder)})
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(CommandError, match=r"AITER_JIT_DIR .*/file cannot be written: File exists"):
        require_jit_folder("aiter", {"AITER_JIT_DIR": str(tmp_path / "file")})


def test_warmup_has_every_engine_option() -> None:
    """Each with a variable, as everywhere."""
    result = CliRunner().invoke(worker, ["warmup", "--help"])
    assert result.exit_code == 0
    assert "worker warmup [OPTIONS]" in result.output
    for name in ("--model", "--kernels", "--tp-size", "--max-num-batched-tokens", "--kv-cache-dtype", "--log-level"):
        assert name in result.output
    for name in ("--port", "--weights-cache", "--prefix-caching", "--drain-timeout"):
        assert name not in result.output
