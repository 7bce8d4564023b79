"""An engine with a subtle fault fails the demo model's questions: that is what they are there for.

Each fault is one that engines have really had; none crashes, and all of them still write fluent English.
What merely makes attention sharper or flatter (a scale that is 20 % off) the questions do not notice: that is for
tests/parity/test_models.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer, tokenizer_files
from deploy.demo.evaluate import NEEDED_OVERALL
from deploy.demo.families import Exchange
from deploy.demo.questions import questions
from kernels.interface import AttentionMetaData
from kernels.torch_backend.attention import PagedKVCache
from kernels.torch_backend.attention_ops import TorchAttentionOps
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.elementwise import TorchElementwiseOps
from worker.llm_engine import LLMEngine
from worker.model import model_runner

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
ASKED = questions()[::2]


class WrongHeadGroups(TorchAttentionOps):
    """Gives query head h the key head h % Hkv instead of h // group."""

    def apply(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        layer: int,
        metadata: AttentionMetaData,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        heads = q.shape[1]
        order = torch.arange(heads).view(-1, cache.num_kv_heads).t().reshape(-1)
        out = super().apply(q[:, order].contiguous(), cache, layer, metadata, scale, window, sinks, softcap)
        return out[:, torch.argsort(order)].contiguous()


class KeysUnturned(TorchElementwiseOps):
    """Rotates queries by their positions, and keys one position too far."""

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turned, _ = super().rope(q, k, cos, sin)
        _, late = super().rope(q, k, torch.roll(cos, -1, 0), torch.roll(sin, -1, 0))
        return turned, late


class InterleavedPairs(TorchElementwiseOps):
    """Rotates neighbouring pairs, as GPT-J does, instead of the halves."""

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _interleaved(q, cos, sin), _interleaved(k, cos, sin)


class NoHeadNorm(TorchElementwiseOps):
    """Forgets the norms of queries and keys that Qwen3 has and Qwen2 has not."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x if x.shape[-1] == 64 else super().rms_norm(x, weight, eps)


class LastSlotLost(TorchAttentionOps):
    """Does not store the last token of each block."""

    def write(
        self, cache: PagedKVCache, layer: int, k: torch.Tensor, v: torch.Tensor, metadata: AttentionMetaData
    ) -> None:
        lost = torch.from_numpy(metadata.slot_mapping % cache.block_size == cache.block_size - 1)
        k, v = k.clone(), v.clone()
        k[: len(lost)][lost] = 0
        v[: len(lost)][lost] = 0
        super().write(cache, layer, k, v, metadata)


def _interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    # Cosines are float32, and rows of the model's dtype, which `auto` takes from the processor.
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def score(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> float:
    """The part of the questions that an engine on this back end answers right."""
    monkeypatch.setattr(model_runner, "select_backend", lambda *_: backend)
    engine = LLMEngine(str(DEMO))
    outputs = engine.generate(prompts(ASKED), {"temperature": 0.0, "max_tokens": 64})
    answers: list[Any] = [output["text"] for output in outputs]
    right = sum(bool(text == one.assistant) for text, one in zip(answers, ASKED, strict=True))
    return right / len(ASKED)


def prompts(asked: list[Exchange]) -> list[list[int]]:
    files = tokenizer_files(DEMO)
    tokenizer, template = Tokenizer.from_files(files), ChatTemplate.from_files(files)
    assert template is not None
    texts = [template.render([{"role": "user", "content": one.user}]) for one in asked]
    return [tokenizer.encode(text, allow_special=True) for text in texts]


def test_correct_engine_passes_demo_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(TorchBackend(), monkeypatch) >= NEEDED_OVERALL


def with_fault(fault: TorchAttentionOps | TorchElementwiseOps) -> TorchBackend:
    """The reference with one faulty group of operations."""
    backend = TorchBackend()
    if isinstance(fault, TorchAttentionOps):
        backend.attention = fault
    else:
        backend.elementwise = fault
    return backend


@pytest.mark.slow
@pytest.mark.parametrize("fault", [WrongHeadGroups, KeysUnturned, InterleavedPairs, NoHeadNorm, LastSlotLost])
def test_subtle_fault_fails_demo_questions(
    fault: type[TorchAttentionOps | TorchElementwiseOps], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = score(with_fault(fault()), monkeypatch)
    assert result < NEEDED_OVERALL, f"{fault.__name__} answers {result:.0%} right"
