"""Trains the demo checkpoint from scratch: `python -m deploy.demo.train --out deploy/demo/checkpoint`.

The tokenizer is trained first, then a Qwen3 model of under five million parameters on the generated corpus, in float32
on the CPU; the result is rounded to bfloat16 and saved in the usual Hugging Face layout.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from deploy.demo.batches import LONGER_ROWS, ROW_LENGTHS, Packer
from deploy.demo.corpus import END_OF_TEXT, FIFTH, FIRST, FOURTH, SECOND, SEED, SEVENTH, SIXTH, THIRD, TURN_END, Mixture
from deploy.demo.muon import Muon
from deploy.demo.tokenizer import CONTEXT_LENGTH, packaged, token_id, train_tokenizer

REPORT = "training_report.json"
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.05
ROPE_THETA = 10000.0
_THREADS = 2
_REPORT_EVERY = 50


def build_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """The untrained model. Its query width, 6 heads of 64, differs from its hidden size on purpose."""
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        eos_token_id=token_id(tokenizer, TURN_END),
        pad_token_id=token_id(tokenizer, END_OF_TEXT),
    )
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(config)


def generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    """Defaults of sampling parameters. Two tokens stop an answer: a turn ends a chat answer, the end of text a
    completion.

    Without filters one story in fourteen turns into sums or JSON in its middle; with these values none of 400 does.
    """
    ends = [token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)]
    return GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=ends, pad_token_id=ends[1], do_sample=True, temperature=0.8, top_p=0.95
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training: linear warm-up to the peak, then linearly down, to zero after `horizon` steps.

    A stage may end before its horizon. Each starts from the weights that the one before has saved, in bfloat16, with a
    fresh optimizer.
    """

    mixture: Mixture
    steps: int
    horizon: int
    peak: float
    row_lengths: tuple[int, ...] = ROW_LENGTHS
    products: torch.dtype = torch.float32
    """Type in which the matrices are multiplied; bfloat16 takes a third less time where the processor has it."""

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step; steps count from one."""
        falling = (self.horizon - step + 1) / (self.horizon - WARMUP_STEPS)
        return self.peak * min(step / WARMUP_STEPS, falling)


STAGES = (
    Stage(FIRST, steps=1600, horizon=2300, peak=2.5e-3),
    Stage(SECOND, steps=700, horizon=700, peak=1.5e-3),
    Stage(THIRD, steps=350, horizon=350, peak=1.5e-3),
    Stage(FOURTH, steps=400, horizon=700, peak=1.0e-3, row_lengths=LONGER_ROWS),
    Stage(FIFTH, steps=350, horizon=350, peak=1.0e-3, row_lengths=LONGER_ROWS, products=torch.bfloat16),
    Stage(SIXTH, steps=750, horizon=750, peak=1.0e-3, row_lengths=LONGER_ROWS, products=torch.bfloat16),
    Stage(SEVENTH, steps=300, horizon=300, peak=0.8e-3, row_lengths=LONGER_ROWS, products=torch.bfloat16),
)


def batch_loss(model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy over the learned positions of ids and labels `[rows, length]`.

    Only the hidden states that predict a learned token go through the output layer.
    """
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    counted = targets != -100
    return cross_entropy(model.lm_head(hidden[counted]), targets[counted])


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms, one learning rate for both."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        named = list(model.named_parameters())
        inner = [parameter for name, parameter in named if parameter.ndim > 1 and "embed" not in name]
        outer = [parameter for name, parameter in named if parameter.ndim <= 1 or "embed" in name]
        self._parameters = [*inner, *outer]
        self._muon = Muon(inner, WEIGHT_DECAY)
        self._adam = AdamW(outer, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, rate: float) -> None:
        """Applies the gradients with this learning rate and clears them."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._muon.step(rate)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        for parameter in self._parameters:
            parameter.grad = None


def load(out: Path) -> Qwen3ForCausalLM:
    """The model of the checkpoint folder, in float32."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32)
    return model


def _amend(file: Path, key: str, value: float | str) -> None:
    """Sets one key of a JSON file."""
    content = json.loads(file.read_text()) | {key: value}
    file.write_text(json.dumps(content, indent=2) + "\n")


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path, report: dict[str, Any]) -> None:
    """Writes the checkpoint folder: weights rounded to bfloat16, configs, tokenizer and the training report."""
    rounded = copy.deepcopy(model).bfloat16()
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = generation_config(tokenizer)
    rounded.save_pretrained(out)
    packaged(tokenizer).save_pretrained(out)
    # What transformers 5 writes, spelled as published Qwen3 checkpoints and older readers have it.
    _amend(out / "config.json", "rope_theta", ROPE_THETA)
    _amend(out / "tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast")
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n")


def run_stage(model: Qwen3ForCausalLM, packer: Packer, stage: Stage) -> None:
    """Trains the model in place through one stage, printing the mean loss now and then."""
    optimizer, started, recent = Optimizer(model), time.monotonic(), 0.0
    for step in range(1, stage.steps + 1):
        with torch.autocast("cpu", stage.products, enabled=stage.products != torch.float32):
            loss = batch_loss(model, *packer.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(stage.learning_rate(step))
        recent += loss.item() / _REPORT_EVERY
        if step % _REPORT_EVERY == 0:
            minutes = (time.monotonic() - started) / 60
            print(f"step {step:5d} of {stage.steps}  loss {recent:.4f}  {minutes:5.1f} min", flush=True)
            recent = 0.0


def train(out: Path, first: int) -> None:
    """Runs the stages from number `first` on, each from the checkpoint in `out` that the one before left there."""
    torch.set_num_threads(_THREADS)
    tokenizer = train_tokenizer()
    report: dict[str, Any] = {"documents": [], "minutes": []}
    if first > 0:
        report = json.loads((out / REPORT).read_text())
    for stage in STAGES[first:]:
        started, packer = time.monotonic(), Packer(tokenizer, stage.mixture, stage.row_lengths)
        model = load(out) if report["documents"] else build_model(tokenizer)
        run_stage(model, packer, stage)
        report["documents"].append(packer.taken)
        report["minutes"].append(round((time.monotonic() - started) / 60, 1))
        save(model, tokenizer, out, report)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--first-stage", type=int, default=0, help="Go on from the checkpoint in --out.")
    arguments = parser.parse_args()
    train(arguments.out, arguments.first_stage)


if __name__ == "__main__":
    main()
