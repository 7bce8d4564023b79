"""A worker that cannot speculate as it is told says so in one line when it starts, and ends: each fault of the option,
and of the models that it names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint, make_eagle3_head, make_mtp_checkpoint
from tests.covering import slow_but
from tests.e2e.service import REPOSITORY, SMALL_POOL

VOCAB_SIZE: Final = 384
# Layers of the target whose streams a head takes.
AUX_LAYERS: Final[dict[str, Any]] = {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}


def target(folder: Path) -> Path:
    return make_checkpoint(folder / "model", num_hidden_layers=1, vocab_size=VOCAB_SIZE)


def asked(method: str, folder: Path | str = "", **given: Any) -> str:
    return json.dumps({"method": method, "num_speculative_tokens": 3, "model": str(folder), **given})


def other_head(folder: Path, **entries: Any) -> Path:
    """A head for the target whose config.json says something else."""
    made = make_eagle3_head(folder / "head", target(folder), **AUX_LAYERS)
    config = made / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))
    return made


def other_model(folder: Path, **shape: Any) -> Path:
    return make_checkpoint(folder / "small", num_hidden_layers=1, **{"vocab_size": VOCAB_SIZE, **shape})


def other_tokens(folder: Path) -> Path:
    """A model of as many ids, one of which is another token."""
    made = other_model(folder)
    file = made / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    assert '"<|im_start|>"' in text
    file.write_text(text.replace("<|im_start|>", "<|turn|>"), encoding="utf-8")
    return made


def without(made: Path, end: str) -> Path:
    """Without a tensor whose name ends so."""
    file = made / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(end)]
    del tensors[name]
    save_file(tensors, file)
    return made


def mtp_without(folder: Path) -> str:
    without(make_mtp_checkpoint(folder / "model", "glm4_moe", num_hidden_layers=1), "eh_proj.weight")
    return asked("mtp")


# What the option says in a folder where the target is or will be, and what the worker says to it.
FAULTS: Final[dict[str, tuple[Callable[[Path], str], str]]] = {
    "no JSON": (lambda _: "{method: ngram}", "'{method: ngram}' is not a JSON object; use for example"),
    "no object": (lambda _: '["ngram", 4]', "is not a JSON object; use for example"),
    "unknown key": (lambda _: asked("ngram", k=4), "k is unknown; valid: num_speculative_tokens, method, model"),
    "no method": (lambda _: '{"num_speculative_tokens": 4}', "method is missing; use for example"),
    "unknown method": (
        lambda _: asked("medusa"),
        "speculative_config.method is 'medusa'; valid: ngram, mtp, eagle3, draft_model",
    ),
    "no drafts": (lambda _: asked("ngram", num_speculative_tokens=0), "num_speculative_tokens is 0; valid: 1 to 16"),
    "too many drafts": (
        lambda _: asked("ngram", num_speculative_tokens=17),
        "num_speculative_tokens is 17; valid: 1 to 16",
    ),
    "a text for a number": (
        lambda _: asked("ngram", num_speculative_tokens="4"),
        "num_speculative_tokens is '4'; valid: of type int",
    ),
    "no model named": (lambda _: asked("eagle3"), "speculative_config.model is ''; valid: a folder, or a name"),
    "a model for lookup": (lambda _: asked("ngram", "/models/head"), "speculative_config.model is '/models/head'"),
    "no such folder": (
        lambda _: asked("draft_model", "/nowhere/at/all"),
        "speculative_config.model /nowhere/at/all: ",
    ),
    "other tokens": (
        lambda folder: asked("draft_model", other_tokens(folder)),
        "its tokenizer differs from the model's; use a draft model that shares it",
    ),
    "more tokens": (
        lambda folder: asked("draft_model", other_model(folder, vocab_size=VOCAB_SIZE + 16)),
        "its tokenizer differs from the model's; use a draft model that shares it",
    ),
    "a draft model without a tensor": (
        lambda folder: asked("draft_model", without(other_model(folder), "mlp.up_proj.weight")),
        "mlp.up_proj.weight",
    ),
    "a model for a head": (
        lambda folder: asked("eagle3", other_model(folder)),
        "architecture not supported: Qwen3ForCausalLM; supported: LlamaForCausalLMEagle3",
    ),
    "a head of another vocabulary": (
        lambda folder: asked("eagle3", other_head(folder, vocab_size=VOCAB_SIZE + 16)),
        f"vocab_size is {VOCAB_SIZE + 16}, but the model has {VOCAB_SIZE}; give a head that was made for it",
    ),
    "a head of another width": (
        lambda folder: asked("eagle3", other_head(folder, target_hidden_size=48)),
        "target_hidden_size is 48, but the model has 64; give a head that was made for it",
    ),
    "a head of a deeper model": (
        lambda folder: asked("eagle3", other_head(folder, eagle_aux_hidden_state_layer_ids=[2, 18, 33])),
        "eagle_aux_hidden_state_layer_ids [2, 18, 33] do not fit a target of 1 layers",
    ),
    "a head without a tensor": (
        lambda folder: asked("eagle3", without(other_head(folder), "fc.weight")),
        "fc.weight",
    ),
    "no layer that drafts": (
        lambda _: asked("mtp"),
        "speculative_config.method mtp: Qwen3ForCausalLM has no layers that draft (MTP)",
    ),
    "a layer without a tensor": (mtp_without, "eh_proj.weight"),
}


@pytest.mark.parametrize("fault", slow_but({"unknown key"}, FAULTS))
def test_worker_reports_bad_setting_in_one_line_and_exits(fault: str, tmp_path: Path) -> None:
    option, message = FAULTS[fault]
    said = option(tmp_path)
    folder = tmp_path / "model"
    if not folder.exists():
        target(tmp_path)
    command = [sys.executable, "-m", "worker", "--model", str(folder), "--port", "0", "--speculative-config", said]
    environment = {**os.environ, **SMALL_POOL, "FISSILE_LOG_LEVEL": "error"}
    run = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
