"""The demo model through the running service: it answers its held-out questions, with the very text of transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fissile.v1 import inference_pb2 as pb

from deploy.demo.evaluate import NEEDED_OVERALL, NEEDED_PER_FAMILY
from deploy.demo.families import FAMILIES
from deploy.demo.questions import questions
from tests.e2e.service import REPOSITORY, Answer, Service, chat, generate, running_service

pytestmark = pytest.mark.slow

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
AT_ONCE = 32
LONGEST_ANSWER = 96
PLAIN_PROMPTS = ("Once upon a time", "12 + 7 =", "The word cat is spelled", "a", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("demo"), DEMO, worker_options=["--dtype", "float32"]) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Any:
    """Greedy text of transformers in float32, as a function of prompt and whether it is a user's message."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    model: Any = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    def complete(prompt: str, *, is_message: bool) -> str:
        if is_message:
            chat_turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(chat_turn, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False)
        return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return complete


GREEDY = pb.SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER)


def answer_to(service: Service, question: str) -> Answer:
    message = pb.ChatMessage(role="user", content=question)
    return chat(service.stub, pb.ChatRequest(messages=[message], sampling_params=GREEDY))


def test_demo_answers_held_out_questions(service: Service) -> None:
    asked = questions()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda one: answer_to(service, one.user), asked))
    totals = Counter(one.family for one in asked)
    right = Counter(one.family for one, answer in zip(asked, answers, strict=True) if answer.text == one.assistant)
    assert len(asked) == 240
    assert min(totals[family] for family in FAMILIES) >= 30
    assert right.total() >= NEEDED_OVERALL * len(asked), right
    assert all(right[family] >= NEEDED_PER_FAMILY * totals[family] for family in FAMILIES), right


def test_demo_chat_equals_transformers(service: Service, reference: Any) -> None:
    messages = [one.user for one in questions()[::8]] + ["Hello", "Tell me a story about a fox.", "Wer bist du? 🦊"]
    for message in messages:
        assert answer_to(service, message).text == reference(message, is_message=True), message


def test_demo_completion_equals_transformers(service: Service, reference: Any) -> None:
    for prompt in PLAIN_PROMPTS:
        answer = generate(service.stub, pb.GenerateRequest(text=prompt, sampling_params=GREEDY))
        assert answer.text == reference(prompt, is_message=False), prompt
