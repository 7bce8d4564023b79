"""GGUF files through router and worker: tokens and log probabilities of the checkpoint that they are worth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fissile.v1 import inference_pb2 as pb

from common.text.tokenizer import Tokenizer
from tests.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.covering import slow_but
from tests.e2e.service import REPOSITORY, Service, chat, running_service
from tests.gguf_files import GgufContent, convert

NEW_TOKENS = 12
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
PROMPTS = ("The first", "A longer text, with 12 numbers: 3.14!", "The first", "x" * 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint, and `model/m-Q4_K.gguf` beside it, which is worth the same."""
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen2", **SHAPE)
    (folder / "model").mkdir()
    content = convert(folder, "Q4_K")
    # transformers cuts texts for Qwen2 in this way, whatever tokenizer.json says.
    content.metadata["tokenizer.ggml.pre"] = "qwen2"
    (folder / "model" / "m-Q4_K.gguf").write_bytes(content.to_bytes())
    return folder


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--dtype", "float32", "--max-model-len", "256"]
    with running_service(tmp_path_factory.mktemp("service"), folder / "model", worker_options=options) as service:
        yield service


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def test_tokens_and_log_probabilities_equal_transformers(service: Service, folder: Path, reference: Any) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for text in PROMPTS:
        request = pb.GenerateRequest(
            text=text,
            sampling_params=pb.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
            output_options=pb.OutputOptions(return_token_ids=True, logprobs=1),
        )
        entries = [entry for part in service.stub.Generate(request, timeout=120.0) for entry in part.logprobs]
        prompt, tokens = tokenizer.encode(text), [entry.token_id for entry in entries]
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = torch.tensor([entry.logprob for entry in entries])
        assert (found - expected).abs().max() < 1e-5 * logits.abs().max()


def test_chat_uses_the_template_of_the_file(service: Service, folder: Path) -> None:
    params = pb.SamplingParams(temperature=0, max_tokens=2)
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hello")], sampling_params=params)
    answer = chat(service.stub, request)
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_folder(folder).encode(rendered, allow_special=True)
    assert "<|im_start|>assistant" in CHAT_TEMPLATE
    assert answer.prompt_info is not None
    assert answer.prompt_info.prompt_tokens == len(ids)


def no_metadata(content: GgufContent, key: str) -> bytes:
    del content.metadata[key]
    return content.to_bytes()


BROKEN: dict[str, tuple[Callable[[GgufContent], bytes], str]] = {
    "cut": (lambda content: content.to_bytes()[:-40], "ends at byte"),
    "architecture": (
        lambda content: GgufContent(content.metadata | {"general.architecture": "bert"}, content.tensors).to_bytes(),
        "has the architecture bert; supported: llama, qwen2, ",
    ),
    "setting": (lambda content: no_metadata(content, "qwen2.block_count"), "has no qwen2.block_count"),
    "unknown setting": (
        lambda content: GgufContent(content.metadata | {"qwen2.attention.scale": 0.5}, content.tensors).to_bytes(),
        "qwen2.attention.scale is not supported for this architecture",
    ),
    "tokenizer": (lambda content: no_metadata(content, "tokenizer.ggml.model"), "has no tokenizer; supported: gpt2"),
    "pieces": (
        lambda content: GgufContent(content.metadata | {"tokenizer.ggml.pre": "new"}, content.tensors).to_bytes(),
        "tokenizer.ggml.pre is new; supported: gpt-2, ",
    ),
}


@pytest.mark.parametrize("case", slow_but({"cut", "pieces"}, list(BROKEN)))
def test_broken_file_is_one_line_and_exit_code_2(tmp_path: Path, case: str) -> None:
    make, said = BROKEN[case]
    file = tmp_path / "m.gguf"
    file.write_bytes(make(convert(make_checkpoint(tmp_path, "qwen2", num_hidden_layers=1), "Q8_0")))
    command = [sys.executable, "-m", "worker", "--model", str(file), "--port", "0"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    [line] = run.stderr.splitlines()
    assert line.startswith(f"error: {file}")
    assert said in line
