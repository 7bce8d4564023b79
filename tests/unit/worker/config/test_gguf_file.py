"""Headers of GGUF files: what is read, and one line for each that is damaged, contradictory or hostile."""

from __future__ import annotations

import multiprocessing
import random
import struct
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.files import UnreadableFileError
from common.text.tokenizer import TokenizerError
from tests.checkpoints import make_checkpoint
from tests.gguf_files import GgufContent, convert, float_tensor
from worker.config.gguf_file import GgufModel, gguf_files, read_gguf
from worker.config.model_config import ModelConfig, ModelError
from worker.config.model_tokenizer import model_tokenizer
from worker.model.architectures import model_class
from worker.weights.checkpoint import load_weights, weight_files, weights_digest

HUGE = 2**60
# Kilobytes by which a process may grow that reads files of 88 kilobytes hundreds of times; it grew by 120.
GROWTH = 4_000


def small() -> GgufContent:
    """A file with values of many kinds, and two tensors."""
    tensors = {"a": float_tensor("F32", torch.arange(12.0).view(3, 4)), "b": float_tensor("BF16", torch.ones(5))}
    metadata: dict[str, Any] = {"general.architecture": "llama", "n": 7, "x": 0.5, "yes": True, "empty": ""}
    return GgufContent(metadata | {"texts": ["", "é", "two words"], "ids": [1, -2], "reals": [0.25, 1.0]}, tensors)


def read(path: Path, content: bytes) -> GgufModel:
    path.write_bytes(content)
    return read_gguf(gguf_files(path))


def refusal(path: Path, content: bytes) -> str:
    with pytest.raises(UnreadableFileError) as caught:
        read(path, content)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 600
    return text


def test_values_and_tensors_are_read(tmp_path: Path) -> None:
    content = small()
    model = read(tmp_path / "m.gguf", content.to_bytes())
    assert {key: model.metadata[key] for key in ("n", "x", "yes", "empty")} == {
        "n": 7,
        "x": 0.5,
        "yes": True,
        "empty": "",
    }
    assert model.strings("texts") == ["", "é", "two words"]
    assert list(model.numbers("ids")) == [1, -2]
    assert list(model.numbers("reals")) == [0.25, 1.0]
    assert model.strings("absent") == []
    assert model.floats("a") == [float(i) for i in range(12)]
    assert model.tensors["b"].shape == (5,)
    for name, tensor in content.tensors.items():
        place = model.tensors[name]
        stored = (tmp_path / "m.gguf").read_bytes()[place.offset : place.offset + place.num_bytes]
        assert stored == tensor.data


def test_each_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = small().to_bytes()
    for end in range(len(whole)):
        assert refusal(tmp_path / "m.gguf", whole[:end])


def changed(old: bytes, new: bytes) -> bytes:
    """The small file with some bytes of its header replaced."""
    whole = small().to_bytes()
    assert whole.count(old) == 1
    return whole.replace(old, new)


COUNTS = struct.pack("<QQ", 2, 8)
TENSOR_A = struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 4, 3, 0, 0)
TENSOR_B = struct.pack("<Q", 1) + b"b" + struct.pack("<IQIQ", 1, 5, 30, 64)
TEXTS = struct.pack("<Q", 5) + b"texts" + struct.pack("<IIQ", 9, 8, 3)


def tensor_a(dimensions: int = 2, columns: int = 4, rows: int = 3, kind: int = 0, offset: int = 0) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", dimensions, columns, rows, kind, offset)


def tensor_b(name: bytes = b"b", kind: int = 30, offset: int = 64) -> bytes:
    return struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 5, kind, offset)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "it is empty"),
    "magic": (lambda: changed(b"GGUF", b"GGML"), "not a GGUF file"),
    "old version": (lambda: GgufContent({}, version=1).to_bytes(), "version 1; supported: little-endian"),
    "new version": (lambda: GgufContent({}, version=4).to_bytes(), "version 4; supported: little-endian"),
    "big endian": (lambda: b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of big-endian machines"),
    "tensors": (lambda: changed(COUNTS, struct.pack("<QQ", HUGE, 8)), "tensors has 1152921504606846976 items"),
    "values": (lambda: changed(COUNTS, struct.pack("<QQ", 2, HUGE)), "metadata has 1152921504606846976"),
    "more tensors": (lambda: changed(COUNTS, struct.pack("<QQ", 60000, 8)), "of 60000 items does not fit"),
    "array": (lambda: changed(TEXTS, TEXTS[:-8] + struct.pack("<Q", HUGE)), "has 1152921504606846976 items"),
    "long array": (
        lambda: changed(TEXTS, TEXTS[:-8] + struct.pack("<Q", 2**20)),
        "1048576 items does not",
    ),
    "array of arrays": (
        lambda: changed(TEXTS, TEXTS[:-12] + struct.pack("<IQ", 9, 3)),
        "is an array of type 9",
    ),
    "string": (
        lambda: changed(b"\x02" + bytes(7) + "é".encode(), struct.pack("<Q", HUGE) + b"xx"),
        "texts ends beyond",
    ),
    "key": (lambda: changed(b"\x03" + bytes(7) + b"yes", struct.pack("<Q", 2**64 - 1) + b"yes"), "a key ends beyond"),
    "value type": (
        lambda: changed(b"yes" + struct.pack("<I", 7), b"yes" + struct.pack("<I", 99)),
        "yes has the type 99",
    ),
    "same key": (lambda: changed(b"\x01" + bytes(7) + b"n", b"\x01" + bytes(7) + b"x"), "key 'x' is there twice"),
    "key not text": (lambda: changed(b"yes", b"\xff\xfe\xfd"), "a key is not UTF-8"),
    "dimensions": (lambda: changed(TENSOR_A, tensor_a(dimensions=HUGE % 2**31 + 5)), "has 5 dimensions; 1 to 4 are"),
    "no dimension": (lambda: changed(TENSOR_A, tensor_a(dimensions=0)), "has 0 dimensions"),
    "huge dimension": (lambda: changed(TENSOR_A, tensor_a(rows=HUGE)), "'a' ends at byte"),
    "zero rows": (lambda: changed(TENSOR_A, tensor_a(rows=0)), "is F32 [0, 4]; rows must be blocks"),
    "blocks": (lambda: changed(TENSOR_A, tensor_a(kind=12)), "is Q4_K [3, 4]; rows must be blocks of 256 numbers"),
    "tensor type": (lambda: changed(TENSOR_A, tensor_a(kind=16)), "has the type IQ2_XXS; supported: F32, F16"),
    "unknown type": (lambda: changed(TENSOR_A, tensor_a(kind=2**32 - 1)), "has the type number 4294967295"),
    "unaligned": (lambda: changed(TENSOR_B, tensor_b(offset=65)), "begins at 65, no multiple of 32"),
    "beyond the end": (lambda: changed(TENSOR_B, tensor_b(offset=HUGE)), "ends at byte"),
    "overlap": (lambda: changed(TENSOR_B, tensor_b(offset=32)), "tensors 'a' and 'b' overlap"),
    "same tensor": (lambda: changed(TENSOR_B, tensor_b(name=b"a")), "tensor 'a' is there twice"),
    "more than there is": (lambda: changed(TENSOR_B, tensor_b(kind=0)), "ends at byte"),
    "lines": (lambda: changed(TENSOR_B, tensor_b(name=b"\n", kind=16)), r"tensor '\n' has"),
    "alignment 0": (lambda: GgufContent({"general.alignment": 0}).to_bytes(), "general.alignment is 0; it must be"),
    "alignment 24": (lambda: GgufContent({"general.alignment": 24}).to_bytes(), "it must be a power of two"),
    "alignment text": (lambda: GgufContent({"general.alignment": "32"}).to_bytes(), "it must be a power of two"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused(tmp_path: Path, case: str) -> None:
    content, expected = HOSTILE[case]
    assert expected in refusal(tmp_path / "m.gguf", content())


def test_other_alignment_is_read(tmp_path: Path) -> None:
    content = small()
    content.metadata["general.alignment"] = content.alignment = 256
    model = read(tmp_path / "m.gguf", content.to_bytes())
    assert model.floats("a") == [float(i) for i in range(12)]
    assert all(tensor.offset % 256 == 0 for tensor in model.tensors.values())


def split(content: GgufContent, folder: Path, **changes: int) -> list[Path]:
    """The content in two files, as llama.cpp splits it."""
    names = list(content.tensors)
    files = []
    for number, some in enumerate((names[:1], names[1:])):
        own = {"split.no": number, "split.count": 2, "split.tensors.count": len(names), **changes}
        metadata = content.metadata | own if not number else own
        files.append(folder / f"m-{number + 1:05}-of-00002.gguf")
        files[-1].write_bytes(GgufContent(metadata, {name: content.tensors[name] for name in some}).to_bytes())
    return files


def test_split_files_are_one_model(tmp_path: Path) -> None:
    files = split(small(), tmp_path)
    for given_path in (*files, tmp_path):
        assert gguf_files(given_path) == files
    model = read_gguf(files)
    assert model.path == files[0]
    assert {name: tensor.file for name, tensor in model.tensors.items()} == {"a": files[0], "b": files[1]}
    assert model.strings("texts") == ["", "é", "two words"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split.no": 0}, "is not part 2 of 2 by its metadata"),
        ({"split.count": 3}, "is not part 2 of 2 by its metadata"),
        ({"split.tensors.count": 5}, "is one of 2 parts with 5 tensors; found: 2 files with 2 tensors"),
    ],
)
def test_contradictory_parts_are_refused(tmp_path: Path, changes: dict[str, int], said: str) -> None:
    files = split(small(), tmp_path, **changes)
    with pytest.raises(UnreadableFileError, match=said):
        read_gguf(gguf_files(files[0]))


def test_missing_part_and_tensor_of_two_parts_are_refused(tmp_path: Path) -> None:
    files = split(small(), tmp_path)
    twice = small()
    twice.metadata = {"split.no": 1, "split.count": 2}
    files[1].write_bytes(twice.to_bytes())
    with pytest.raises(UnreadableFileError, match="tensor a is in another part too"):
        read_gguf(files)
    files[1].unlink()
    with pytest.raises(UnreadableFileError, match=r"lacks m-00002-of-00002\.gguf"):
        gguf_files(files[0])


def test_folder_with_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).write_bytes(small().to_bytes())
    with pytest.raises(ModelError, match=r"has 2 GGUF files; name one of them, such as m-Q4_0\.gguf, m-Q8_0\.gguf"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert gguf_files(tmp_path) == []
    assert gguf_files(tmp_path / "absent.gguf") == []


def test_device_is_refused() -> None:
    with pytest.raises(ModelError, match="/dev/zero is not a regular file"):
        ModelConfig.from_folder("/dev/zero")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GgufContent:
    """A whole model of one layer."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    return convert(folder, "Q8_0")


def load(path: Path) -> None:
    """Reads all that a worker reads of a file.

    Raises:
        ModelError, TokenizerError: it cannot be used; one line.
    """
    config = ModelConfig.from_folder(path)
    weights = load_weights(path, model_class(config.architecture).tensor_shapes(config))
    weights.take("model.norm.weight")
    weights_digest(path)
    weight_files(path)
    model_tokenizer(path)


def most_kilobytes() -> int:
    """High-water mark of this process's memory, which begins anew with each program that is started."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1])


def load_with_wrong_bits(path: Path) -> tuple[list[str], int, int]:
    """Reads a file again and again, each time with another wrong bit in its settings. For a process of its own.

    Returns:
        The refusals; kilobytes by which the process grew; and by which it grew when it then took 8 MB.
    """
    whole, rnd = path.read_bytes(), random.Random(5)
    load(path)
    marks, lines = [most_kilobytes()], list[str]()
    for at in range(0, whole.index(b"tokenizer.ggml.tokens") + 40, 2):
        wrong = bytearray(whole)
        wrong[at] ^= 1 << rnd.randrange(8)
        path.write_bytes(wrong)
        try:
            ModelConfig.from_folder(path)
        except ModelError as error:
            lines.append(str(error))
    marks.append(most_kilobytes())
    taken = bytearray(8_000_000)
    marks.append(most_kilobytes())
    del taken
    return lines, marks[1] - marks[0], marks[2] - marks[1]


def test_model_with_one_wrong_bit_is_read_or_refused(model: GgufContent, tmp_path: Path) -> None:
    """No other exception, and no memory beyond a few copies of the file, whatever bit of the settings is wrong."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model.to_bytes())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        lines, growth, seen = process.submit(load_with_wrong_bits, path).result(timeout=120)
    assert all("\n" not in line for line in lines)
    assert len(lines) > 100
    assert growth < GROWTH
    # The mark sees memory of that size.
    assert seen > GROWTH


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_model_with_wrong_bytes_is_read_or_refused(
    model: GgufContent, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    wrong, end = bytearray(model.to_bytes()), len(model.header())
    number = st.integers(0, 2**64 - 1).map(lambda n: struct.pack("<Q", n))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        wrong[at : at + 8] = data.draw(st.one_of(st.binary(min_size=8, max_size=8), number))
    path = tmp_path_factory.mktemp("wrong") / "m.gguf"
    path.write_bytes(wrong)
    said = ""
    try:
        load(path)
    except (ModelError, TokenizerError) as error:
        said = str(error)
    assert "\n" not in said
