"""A key that config.json leaves out means what transformers takes for granted, in float32: logits of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.parity.test_models import close, load_models

GROUPED: dict[str, Any] = {"n_routed_experts": 16, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *((name, GROUPED, (key,)) for name in ("deepseek_v3", "deepseek_v32") for key in list(GROUPED)[1:]),
    ("deepseek_v3", GROUPED, ("n_group", "topk_group")),
    ("deepseek_v3", {**GROUPED, "q_lora_rank": 1536}, ("q_lora_rank",)),
    ("qwen3", {"head_dim": 128}, ("head_dim",)),
    ("gpt_oss", {"head_dim": 64, "rope_parameters": GPT_OSS_ROPE}, ("head_dim",)),
    ("gpt_oss", {"head_dim": 64, "rope_parameters": GPT_OSS_ROPE}, ("rope_parameters",)),
]


@pytest.mark.parametrize(
    ("architecture", "shape", "absent"), CASES, ids=[f"{name}-{'-'.join(absent)}" for name, _, absent in CASES]
)
def test_absent_keys_default_as_in_transformers(
    architecture: str, shape: dict[str, Any], absent: tuple[str, ...], tmp_path: Path
) -> None:
    """Former fault: DeepSeek without n_group or routed_scaling_factor gave other numbers without an error."""
    folder = make_checkpoint(tmp_path, architecture, tokenizer=False, **shape)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in absent:
        del config[key]
    path.write_text(json.dumps(config))
    models = load_models(folder)
    prompt = models.random_prompts([130], seed=1)[0]
    close(models.logits(prompt, 0), models.reference.logits(prompt)[-1])
