"""Broken models through `fissile worker` and its neighbours: each is served, or refused in one line with exit code 2.

Each case changes one place of a model's files at random. Commands run within a limit of memory.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.gguf_files import GgufContent, convert
from tests.hostile_models import DELETED, Broken, Commands, commands, load
from tests.quantizers import SCHEMES, quantize_checkpoint
from tests.unit.worker.config.test_published_tokenizer import FOLDERS
from tests.word_checkpoints import WORD_SCHEMES, pack_checkpoint

Files = dict[str, bytes]
EXAMPLES = 5
# Kilobytes beyond those of a whole model. A page of memory that a fork writes counts, whose it ever was.
GROWTH = 100_000
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "vocab_size": 300,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
METADATA: tuple[Any, ...] = (
    DELETED,
    0,
    2**32 - 1,
    "",
    "x",
    "\n\x1b[2J",
    True,
    0.0,
    float("nan"),
    [1, 2],
    ["a", "a"],
    [],
    "a" * 100_000,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Files of small models, by kind."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: make_checkpoint(folder / name, name, **SHAPE) for name in ("qwen3", "gpt_oss", "qwen3_moe")}
    for name in ("gptq", "awq", "compressed-tensors"):
        made[name] = make_checkpoint(folder / name, **SHAPE)
        pack_checkpoint(made[name], WORD_SCHEMES[name])
    for name in ("deepseek", "quark-mxfp4"):
        made[name] = make_checkpoint(folder / name, **SHAPE)
        quantize_checkpoint(made[name], SCHEMES[name])
    return {
        name: {path.name: path.read_bytes() for path in each.iterdir() if path.is_file()} for name, each in made.items()
    }


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> GgufContent:
    return convert(make_checkpoint(tmp_path_factory.mktemp("gguf") / "m", "llama", **SHAPE), "Q8_0")


@pytest.fixture(scope="module")
def started() -> Iterator[Commands]:
    with commands() as running:
        yield running


def broken_json(broken: Broken, files: Files, name: str) -> str:
    files[name], what = broken.json(files[name])
    return f"{name}: {what}"


def broken_quantization(broken: Broken, files: Files) -> str:
    config = json.loads(files["config.json"])
    text, what = broken.json(json.dumps(config["quantization_config"]).encode())
    files["config.json"] = json.dumps({**config, "quantization_config": json.loads(text)}).encode()
    return f"quantization_config: {what}"


def broken_header(broken: Broken, files: Files) -> str:
    content = files["model.safetensors"]
    end = 8 + int.from_bytes(content[:8], "little")
    if broken.draw.random() < 0.3:
        files["model.safetensors"], what = broken.bytes(content, end)
        return what
    text, what = broken.json(content[8:end])
    text += b" " * (-len(text) % 8)
    files["model.safetensors"] = struct.pack("<Q", len(text)) + text + content[end:]
    return what


def broken_tensor(broken: Broken, files: Files) -> str:
    """Fills one tensor with a byte, such as zero points that are out of range."""
    content = files["model.safetensors"]
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    name = broken.draw.choice(sorted(header.keys() - {"__metadata__"}))
    start, stop = (end + offset for offset in header[name]["data_offsets"])
    byte = broken.draw.choice((b"\x00", b"\x7f", b"\x80", b"\xff"))
    files["model.safetensors"] = content[:start] + byte * (stop - start) + content[stop:]
    return f"{name} of {byte!r}"


def broken_tokenizer(broken: Broken, files: Files) -> str:
    form = broken.draw.choice(list(FOLDERS))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files.pop(name, None)
    files |= FOLDERS[form]
    name = broken.draw.choice(list(FOLDERS[form]))
    is_json = name.endswith(".json") and broken.draw.random() < 0.7
    files[name], what = broken.json(files[name]) if is_json else broken.bytes(files[name], len(files[name]))
    return f"{form} {name}: {what}"


QUANTIZED = ("gptq", "awq", "compressed-tensors", "deepseek", "quark-mxfp4")
# Kind of a change -> models that it is made to, and the change.
CHANGES: Mapping[str, tuple[tuple[str, ...], Callable[[Broken, Files], str]]] = {
    "config.json": (("qwen3", "gpt_oss", "qwen3_moe"), lambda broken, files: broken_json(broken, files, "config.json")),
    "quantization": (QUANTIZED, broken_quantization),
    "header": (("qwen3", *QUANTIZED), broken_header),
    "tensor": (("qwen3", "gpt_oss", *QUANTIZED), broken_tensor),
    "tokenizer.json": (("qwen3",), lambda broken, files: broken_json(broken, files, "tokenizer.json")),
    "settings": (("qwen3",), lambda broken, files: broken_json(broken, files, "tokenizer_config.json")),
    "generation": (("qwen3",), lambda broken, files: broken_json(broken, files, "generation_config.json")),
    "published tokenizer": (("qwen3",), broken_tokenizer),
}


def write(folder: Path, files: Files) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHANGES)
def test_broken_checkpoint_is_served_or_refused_in_one_line(
    kind: str, models: dict[str, Files], started: Commands, tmp_path: Path, fresh_seed: int
) -> None:
    most = started.run(*load(write(tmp_path / "m", models["qwen3"]))).kilobytes + GROWTH
    broken = Broken(fresh_seed)
    names, change = CHANGES[kind]
    for _ in range(EXAMPLES):
        name = broken.draw.choice(names)
        files = dict(models[name])
        what = change(broken, files)
        ended = started.run(*load(write(tmp_path / "m", files)))
        assert not ended.fault, (name, what, ended.lines[-3:])
        assert ended.kilobytes < most, (name, what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "metadata"])
def test_broken_gguf_file_is_served_or_refused_in_one_line(
    kind: str, gguf: GgufContent, started: Commands, tmp_path: Path, fresh_seed: int
) -> None:
    broken, file = Broken(fresh_seed), tmp_path / "m.gguf"
    file.write_bytes(gguf.to_bytes())
    most = started.run(*load(file)).kilobytes + GROWTH
    for _ in range(EXAMPLES):
        content, what = gguf.to_bytes(), kind
        if kind == "bytes":
            content, what = broken.bytes(content, len(gguf.header()))
        else:
            key, value = broken.draw.choice(list(gguf.metadata)), broken.draw.choice(METADATA)
            metadata = {name: each for name, each in {**gguf.metadata, key: value}.items() if each is not DELETED}
            content, what = GgufContent(metadata, gguf.tensors).to_bytes(), f"{key} = {value!r}"[:80]
        file.write_bytes(content)
        ended = started.run(*load(file))
        assert not ended.fault, (what, ended.lines[-3:])
        assert ended.kilobytes < most, what


@pytest.mark.parametrize(
    "command", [("worker", "--port", "0", "--model"), ("bench", "offline", "--model"), ("generate", "hi", "--offline")]
)
def test_every_command_refuses_a_broken_model_in_one_line(
    command: tuple[str, ...], started: Commands, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["\x1b[2J\n" + "x" * 100_000]}))
    ended = started.run(*command, str(tmp_path))
    assert ended.code == 2
    assert not ended.fault, ended.lines
    assert "architecture not supported" in ended.lines[-1]
