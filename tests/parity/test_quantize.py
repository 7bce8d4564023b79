"""Weights brought to 8 or 4 bits when they are loaded: on the demo model, from Config to the tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from common.config import Config
from common.errors import InvalidFieldError
from common.params.sampling_params import SamplingParams
from deploy.demo.questions import questions
from tests.native import backend_or_skip
from worker.config.model_config import ModelConfig, ModelError
from worker.llm_engine import LLMEngine
from worker.model.model_runner import ModelRunner
from worker.model.numerics import numerics_digest

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "checkpoint"
MODEL_LEN = 128


@pytest.fixture(autouse=True, scope="module")
def native() -> None:
    backend_or_skip("cpu")


def config(quantize: str = "int8", **changes: object) -> Config:
    common = Config(
        model=str(DEMO),
        dtype="bfloat16",
        kernels="cpu",
        quantize=quantize,
        max_model_len=MODEL_LEN,
        num_kvcache_blocks=64,
        max_num_seqs=8,
    )
    return replace(common, **changes)  # type: ignore[arg-type]


def runner(used: Config) -> ModelRunner:
    return ModelRunner(used, ModelConfig.from_folder(used.model))


@cache
def prompts() -> tuple[str, ...]:
    return tuple(exchange.user for exchange in questions()[::25])


def params(number: int) -> SamplingParams:
    """Every second request samples."""
    return SamplingParams(temperature=0.8 * (number % 2), top_p=0.95, seed=number, max_tokens=12)


@pytest.mark.parametrize(
    ("quantize", "dtype"), [("int8", "bfloat16"), ("int8", "float32"), ("int4", "bfloat16"), ("int4", "float32")]
)
def test_answer_is_equal_alone_and_batched(quantize: str, dtype: str) -> None:
    """In chunks of 20 tokens mixed with decodes, and in whole prompts."""
    given = [params(number) for number in range(len(prompts()))]
    expected = [
        LLMEngine(config(quantize, dtype=dtype, max_num_seqs=1)).generate([prompt], [each])[0]["token_ids"]
        for prompt, each in zip(prompts(), given, strict=True)
    ]
    for policy, budget in (("mixed", 20), ("prefill_first", 512)):
        engine = LLMEngine(config(quantize, dtype=dtype, scheduling_policy=policy, max_num_batched_tokens=budget))
        together = [answer["token_ids"] for answer in engine.generate(list(prompts()), given)]
        assert together == expected


@pytest.mark.parametrize(("quantize", "others"), [("int8", 2), ("int4", 7)])
def test_quantized_has_its_numerics_class_and_close_answers(quantize: str, others: int) -> None:
    exact, quantized = runner(config("no")), runner(config(quantize))
    assert numerics_digest(exact) != numerics_digest(quantized)
    assert numerics_digest(quantized) == numerics_digest(runner(config(quantize)))
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    answers = [
        [answer["text"] for answer in LLMEngine(config(kind)).generate(list(prompts()), greedy)]
        for kind in ("no", quantize)
    ]
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= len(prompts()) - others, "fewer bits change some answers, not all of them"


def test_unsupported_quantize_option_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="quantize"):
        config("int3")
    for quantize, changes in product(("int8", "int4"), ({"kernels": "torch"}, {"dtype": "float16"})):
        message = f"quantize '{quantize}' needs kernels 'cpu' and dtype float32 or bfloat16"
        with pytest.raises(ModelError, match=message):
            runner(config(quantize, **changes))
