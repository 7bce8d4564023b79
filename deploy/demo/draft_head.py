"""Trains an EAGLE-3 head for the demo checkpoint: `python -m deploy.demo.draft_head --out deploy/demo/eagle3`.

The head learns the model's own distributions on the training text. As in EAGLE-3 (arXiv:2503.01840, "training-time
test") it continues from its own states for a few tokens, as it must when it drafts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, linear, rms_norm, silu
from torch.optim import AdamW
from transformers import AutoTokenizer, Qwen3ForCausalLM

from deploy.demo.batches import Packer
from deploy.demo.muon import Muon
from deploy.demo.train import STAGES, load

DEPTH: Final = 3
"""Tokens that it drafts in training: one from the model's states, the others from its own."""

AUX_LAYERS: Final = (1, 2, 3)
STEPS: Final = 800
_WARMUP: Final = 20
_PEAK: Final = 2e-3
_THREADS: Final = 2
_REPORT_EVERY: Final = 20
_HEADS, _KV_HEADS, _HEAD_DIM, _INNER = 4, 2, 64, 384
_LAYER: Final = "midlayer"
# (keys, values) of rows, both [rows, heads, length, head_dim].
Keys = tuple[torch.Tensor, torch.Tensor]


class DraftHead:
    """The head, with the tensors of a `LlamaForCausalLMEagle3` folder.

    Args:
        model: that it drafts for.

    Attributes:
        config: its config.json.
        tensors: by name; the model's embedding is not among them.
    """

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        source: Any = model.config
        hidden, vocab = source.hidden_size, source.vocab_size
        self._eps, self._hidden = source.rms_norm_eps, hidden
        self._embedding = model.model.embed_tokens.weight.detach()
        self.config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "hidden_size": hidden,
            "intermediate_size": _INNER,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "head_dim": _HEAD_DIM,
            "vocab_size": vocab,
            "draft_vocab_size": vocab,
            "max_position_embeddings": source.max_position_embeddings,
            "rms_norm_eps": self._eps,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "dtype": "bfloat16",
        }
        generator = torch.Generator().manual_seed(1)
        shapes = {
            "fc": (hidden, len(AUX_LAYERS) * hidden),
            f"{_LAYER}.self_attn.q_proj": (_HEADS * _HEAD_DIM, 2 * hidden),
            f"{_LAYER}.self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, 2 * hidden),
            f"{_LAYER}.self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, 2 * hidden),
            f"{_LAYER}.self_attn.o_proj": (hidden, _HEADS * _HEAD_DIM),
            f"{_LAYER}.mlp.gate_proj": (_INNER, hidden),
            f"{_LAYER}.mlp.up_proj": (_INNER, hidden),
            f"{_LAYER}.mlp.down_proj": (hidden, _INNER),
        }
        self._matrices = [torch.randn(shape, generator=generator) / shape[1] ** 0.5 for shape in shapes.values()]
        # It begins as the model's own.
        head = self._embedding.clone()
        norms = [f"{_LAYER}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        self._others = [head, *(torch.ones(hidden) for _ in range(len(norms) + 1))]
        names = [*shapes, "lm_head", *norms, "norm"]
        self.tensors = {
            f"{name}.weight": tensor.requires_grad_()
            for name, tensor in zip(names, [*self._matrices, *self._others], strict=True)
        }

    @property
    def matrices(self) -> list[torch.Tensor]:
        """Matrices of its layer."""
        return self._matrices

    @property
    def others(self) -> list[torch.Tensor]:
        """Its output matrix, and norms."""
        return self._others

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """[..., 3 H] of the model -> [..., H]."""
        return linear(aux, self.tensors["fc.weight"])

    def states(self, token_ids: torch.Tensor, states: torch.Tensor, depth: int, known: list[Keys]) -> torch.Tensor:
        """The head's states [rows, length, H] of the tokens after `states`.

        Args:
            token_ids: [rows, length].
            states: [rows, length, H].
            depth: rows are `depth` tokens after those of the model's states with the same index.
            known: keys and values of the depths before; those of this depth are appended.
        """
        normed = self._norm(f"{_LAYER}.hidden_norm", states)
        embedded = self._norm(f"{_LAYER}.input_layernorm", self._embedding[token_ids])
        both = torch.cat((embedded, normed), dim=-1)
        x = states + self._attention(both, depth, known)
        y = self._norm(f"{_LAYER}.post_attention_layernorm", x)
        gated = silu(self._linear("mlp.gate_proj", y)) * self._linear("mlp.up_proj", y)
        return x + self._linear("mlp.down_proj", gated)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V]."""
        return linear(self._norm("norm", states), self.tensors["lm_head.weight"])

    def _attention(self, both: torch.Tensor, depth: int, known: list[Keys]) -> torch.Tensor:
        """Attends to the rows of depth 0 up to the same index, and to the same index at each later depth."""
        queries, keys, values = (
            self._linear(f"self_attn.{name}_proj", both).view(*both.shape[:2], -1, _HEAD_DIM).transpose(1, 2)
            for name in "qkv"
        )
        queries, keys = _turned(queries, depth), _turned(keys, depth)
        known.append(tuple(each.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for each in (keys, values)))  # type: ignore[arg-type]
        (first_keys, first_values), *behind = known
        length = both.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(queries @ first_keys.transpose(2, 3)).masked_fill(later, -torch.inf)]
        scores += [(queries * each).sum(-1, keepdim=True) for each, _ in behind]
        weights = (torch.cat(scores, dim=-1) / _HEAD_DIM**0.5).softmax(-1)
        mixed = weights[..., :length] @ first_values
        for i, (_, each) in enumerate(behind):
            mixed = mixed + weights[..., length + i, None] * each
        return self._linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(2))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.tensors[f"{_LAYER}.{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), (self._hidden,), self.tensors[f"{name}.weight"], self._eps)


def _turned(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary positions of [rows, heads, length, head_dim], from `first` on."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[2]) + float(first), 10000.0 ** -(torch.arange(half) / half))
    one, other = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def target(model: Qwen3ForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [rows, length, 3 H] and logits [rows, length, V] of the model."""
    with torch.no_grad():
        made = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        assert made.hidden_states is not None
        return torch.cat([made.hidden_states[layer] for layer in AUX_LAYERS], dim=-1), made.logits


def losses(
    head: DraftHead, model: Qwen3ForCausalLM, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, list[float]]:
    """The mean loss of all depths, and the share of right first choices at each."""
    aux, wanted = target(model, ids)
    length = ids.shape[1] - DEPTH - 1
    states, known = head.combine(aux[:, :length]), list[Keys]()
    total, right = torch.zeros(()), []
    for depth in range(DEPTH):
        there = slice(depth + 1, depth + 1 + length)
        states = head.states(ids[:, there], states, depth, known)
        counted = labels[:, depth + 2 : depth + 2 + length] != -100
        counted = counted[:, :length]
        own, truth = head.logits(states[counted]), wanted[:, there][counted]
        total = total + cross_entropy(own, truth.softmax(-1)) / DEPTH
        right.append(float((own.argmax(-1) == truth.argmax(-1)).float().mean()))
    return total, right


def train(checkpoint: Path, out: Path, steps: int) -> None:
    """Trains a head, and writes its folder."""
    torch.set_num_threads(_THREADS)
    model, tokenizer = load(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    stage, head = STAGES[-1], DraftHead(model)
    packer = Packer(tokenizer.backend_tokenizer, stage.mixture, stage.row_lengths)
    muon = Muon(head.matrices, 0.01)
    adam = AdamW(head.others, betas=(0.9, 0.95), weight_decay=0.0)
    started, recent = time.monotonic(), [0.0] * DEPTH
    for step in range(1, steps + 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = losses(head, model, *packer.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        rate = _PEAK * min(step / _WARMUP, (steps + 1 - step) / steps)
        torch.nn.utils.clip_grad_norm_([*head.matrices, *head.others], 1.0)
        muon.step(rate)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        for tensor in head.tensors.values():
            tensor.grad = None
        recent = [a + b / _REPORT_EVERY for a, b in zip(recent, right, strict=True)]
        if step % _REPORT_EVERY == 0:
            shares, minutes = ", ".join(f"{share:.3f}" for share in recent), (time.monotonic() - started) / 60
            print(f"step {step:4d} of {steps}  right {shares}  {minutes:5.1f} min", flush=True)
            recent = [0.0] * DEPTH
            save(head, out)
    save(head, out)


def save(head: DraftHead, out: Path) -> None:
    """Writes the head's folder, its weights rounded to bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(head.config, indent=2) + "\n")
    rounded = {name: tensor.detach().bfloat16() for name, tensor in head.tensors.items()}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "eagle3")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    train(arguments.checkpoint, arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
