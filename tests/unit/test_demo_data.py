"""Properties of the demo checkpoint without an engine: held-out questions, tokenizer, size and configs."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from deploy.demo import tools
from deploy.demo.corpus import FIRST, Document, documents, render_chat
from deploy.demo.families import FAMILIES, Exchange, draw, held_out
from deploy.demo.questions import PER_FAMILY, every_question, questions, tool_rounds
from deploy.demo.train import STAGES

CHECKPOINT = Path(__file__).parents[2] / "deploy" / "demo" / "checkpoint"
CORE = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CALL_TOKENS = ("<tool_call>", "</tool_call>")


def read_json(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CHECKPOINT / name).read_text())
    return loaded


def weights_header() -> dict[str, Any]:
    """The JSON header of the safetensors file: an 8-byte little-endian length comes before it."""
    with (CHECKPOINT / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def training_stream() -> Iterator[Document]:
    """The documents of training, stage by stage, in the numbers that the report gives."""
    counts: list[int] = read_json("training_report.json")["documents"]
    for stage, count in zip(STAGES, counts, strict=True):
        yield from itertools.islice(documents(stage.mixture), count)


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(CHECKPOINT)
    return tokenizer


def test_there_are_enough_questions_of_each_family() -> None:
    counts = Counter(question.family for question in questions())
    assert set(counts) == set(FAMILIES)
    assert counts.total() == 240
    assert min(counts.values()) >= max(30, PER_FAMILY)
    with_tools = Counter(one.family for one in every_question()) - counts
    assert {family: count >= 30 for family, count in with_tools.items()} == dict.fromkeys(
        ("calls", "results", "no tool"), True
    )


def test_demo_questions_are_distinct_and_reproducible() -> None:
    asked = questions()
    assert len({question.user for question in asked}) == len(asked)
    assert asked == questions()
    rounds = [made for made, _ in tool_rounds()]
    assert len({made.user for made in rounds}) == len(rounds)
    assert [made for made, _ in tool_rounds()] == rounds


@pytest.mark.slow
def test_no_question_is_in_training_text() -> None:
    """No trained document has a question's content in any phrasing, nor its words."""
    asked = [(one.key, one.user) for one in questions()] + [(made.key, made.user) for made, _ in tool_rounds()]
    keys, prompts = {key for key, _ in asked}, {user for _, user in asked}
    for document in training_stream():
        assert keys.isdisjoint(document.keys)
        assert not any(held_out(key) for key in document.keys)
        turns = document.text.replace("\n", "<|im_end|>").split("<|im_end|>")
        assert prompts.isdisjoint(turns)


@pytest.mark.slow
def test_no_question_or_answer_hides_inside_longer_training_text() -> None:
    """A plain substring search, independent of the generator's bookkeeping.

    Answers of arithmetic, spelling and reversing name the whole problem, so they must not occur either.
    """
    asked = questions()
    wholes = [question.assistant for question in asked if question.family in ("arithmetic", "reversing")]
    needles = [question.user for question in asked if len(question.user) > 12]
    needles += [made.user for made, _ in tool_rounds()]
    stream = training_stream()
    while chunk := "\n".join(document.text for document in itertools.islice(stream, 20_000)):
        found = [needle for needle in needles if needle in chunk]
        found += [whole for whole in wholes if f">assistant\n{whole}<" in chunk or f"\n{whole}\n" in chunk]
        assert found == []


def test_document_stream_is_reproducible() -> None:
    assert list(itertools.islice(documents(FIRST), 300)) == list(itertools.islice(documents(FIRST), 300))


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_and_training_questions_are_disjoint(family: str) -> None:
    rng = random.Random(1)
    assert all(held_out(draw(rng, family, reserved=True).key) for _ in range(50))
    assert not any(held_out(draw(rng, family, reserved=False).key) for _ in range(50))


@pytest.mark.parametrize("tool", tools.TOOLS, ids=lambda tool: tool.name)
def test_held_out_and_training_tool_questions_are_disjoint(tool: tools.DemoTool) -> None:
    rng = random.Random(1)
    assert all(held_out(tools.draw_round(rng, tool, reserved=True).key) for _ in range(20))
    assert not any(held_out(tools.draw_round(rng, tool, reserved=False).key) for _ in range(20))
    assert held_out(f"call:{tools.made_up_tool(rng, reserved=True).name}")


@given(st.text())
def test_every_text_survives_the_tokenizer(text: str) -> None:
    ids = CORE.encode(text, add_special_tokens=False).ids
    assert CORE.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "é",
        "naïve café",
        "日本語 中文",
        "👩‍👩‍👧 🙂",
        "  two  spaces ",
        "\n\n\tx\r\n",
        "▁ <0x41>",
        "\x00",
        *SPECIAL_TOKENS,
        *CALL_TOKENS,
    ],
)
def test_awkward_text_survives_both_loaders(text: str, chat_tokenizer: PreTrainedTokenizerBase) -> None:
    assert CORE.decode(CORE.encode(text).ids, skip_special_tokens=False) == text
    assert chat_tokenizer(text)["input_ids"] == CORE.encode(text).ids
    assert chat_tokenizer.decode(CORE.encode(text).ids) == text


def test_demo_tokenizer_is_bpe_with_token_per_byte() -> None:
    model = read_json("tokenizer.json")["model"]
    assert model["type"] == "BPE"
    assert model["byte_fallback"] is True
    assert len(model["merges"]) > 0
    assert all(f"<0x{value:02X}>" in model["vocab"] for value in range(256))


def test_digits_and_quoted_letters_stand_alone() -> None:
    assert CORE.encode("2031").tokens == list("2031")
    assert CORE.encode('"before"').tokens == list('"before"')


def test_chat_template_output_equals_training_text(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
    ]
    rendered = chat_tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == render_chat([Exchange("chat", "", "Hello", "Hi!")], "You are a helpful assistant.")
    prompt = chat_tokenizer.apply_chat_template(messages[1:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_chat_template_writes_tools_like_training_text(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    """Calls have Qwen3's form, one JSON between delimiter tokens each, and each result is a turn."""
    rng = random.Random(3)
    for _ in range(50):
        given = tools.some_tools(rng)
        made = tools.draw_round(rng, rng.choice(given or tools.TOOLS), reserved=False)
        calls = [{"type": "function", "function": {"name": made.tool.name, "arguments": one}} for one in made.calls]
        messages: list[Any] = [
            {"role": "user", "content": made.user},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "content": result} for result in made.results),
            {"role": "assistant", "content": made.assistant},
        ]
        for system in ("", "You are a helpful assistant."):
            said = [{"role": "system", "content": system}, *messages] if system else messages
            listed: Any = [tool.definition() for tool in given] or None
            rendered = chat_tokenizer.apply_chat_template(said, tools=listed, tokenize=False)
            assert rendered == tools.render(tools.turns_of(made), given, system)
            prompt = chat_tokenizer.apply_chat_template(
                said[:-1], tools=listed, tokenize=False, add_generation_prompt=True
            )
            assert f"{prompt}{made.assistant}<|im_end|>\n" == rendered
    tokens = CORE.encode(tools.written_calls(made.tool, made.calls)).tokens
    assert [tokens.count(token) for token in CALL_TOKENS] == [len(made.calls)] * 2


def test_chat_template_accepts_any_tool_schema_or_none(chat_tokenizer: PreTrainedTokenizerBase) -> None:
    schemas: list[Any] = [{}, {"properties": {"a": True, "b": {"enum": [1]}, "c": {"type": ["string", "null"]}}}]
    given: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}} for schema in schemas]
    given.append({"type": "function", "function": {"name": "g"}})
    rendered = chat_tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=given, tokenize=False)
    first = (
        '{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {"a": "any", "b": "any", "c": ["string", "null"]}}'
    )
    wanted = f'<|im_start|>system\n<tools>\n{first}\n{{"name": "g", "arguments": {{}}}}\n</tools><|im_end|>\n'
    assert rendered == f"{wanted}<|im_start|>user\nx<|im_end|>\n"


def test_demo_checkpoint_is_small_and_in_bfloat16() -> None:
    header = weights_header()
    sizes = [math.prod(entry["shape"]) for entry in header.values()]
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert 3_000_000 <= sum(sizes) <= 5_000_000
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12_000_000


def test_demo_config_is_a_qwen3_config() -> None:
    config = read_json("config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] >= 1024
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["vocab_size"] == CORE.get_vocab_size()


def test_generation_ends_at_either_end_token() -> None:
    ends = [CORE.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert read_json("generation_config.json")["eos_token_id"] == ends
    assert read_json("config.json")["eos_token_id"] in ends
