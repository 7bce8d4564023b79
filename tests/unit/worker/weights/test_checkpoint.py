from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from worker.config.model_config import ModelConfig, ModelError
from worker.config.stored_names import stored_names
from worker.model.models.qwen3 import Qwen3ForCausalLM
from worker.weights.checkpoint import load_weights, weights_digest
from worker.weights.safetensors_file import pieces


def make(folder: Path, **shape: object) -> tuple[Path, dict[str, tuple[int, ...]]]:
    make_checkpoint(folder, num_hidden_layers=1, tokenizer=False, **shape)  # type: ignore[arg-type]
    return folder, Qwen3ForCausalLM.tensor_shapes(ModelConfig.from_folder(folder))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors."""
    file = folder / "model.safetensors"
    kept = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_every_tensor_with_progress(tmp_path: Path, max_shard_size: str) -> None:
    folder, shapes = make(tmp_path, max_shard_size=max_shard_size)
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size == "100KB")
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    seen: list[tuple[int, int]] = []
    weights = load_weights(folder, shapes, lambda done, total: seen.append((done, total)))
    for name, shape in shapes.items():
        assert weights.shape(name) == shape
        assert torch.equal(weights.take(name), stored[name])
    total = sum(tensor.nbytes for tensor in stored.values())
    assert len(seen) == len(shapes)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


PARTS = (slice(None), slice(0, 0), slice(1, 2), slice(3, 11), slice(5, None))


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Written to `tmp_path`: one tensor each of no, one, two and three dimensions."""
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (13,), (12, 17), (7, 12, 13)]
    made = {f"{len(shape)}d": torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes}
    save_file(made, tmp_path / "model.safetensors")
    return made


@pytest.mark.parametrize("piece_bytes", [1, 40, 1000, 4 << 20])
def test_parts_of_tensors(
    tmp_path: Path, tensors: dict[str, torch.Tensor], piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "__defaults__", (piece_bytes,))
    weights = load_weights(tmp_path, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert torch.equal(weights.take("0d"), tensors["0d"])
    for rows, columns, middle in product(PARTS, PARTS, PARTS):
        expected: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
            "1d": (tensors["1d"][rows], {"rows": rows}),
            "2d": (tensors["2d"][rows, columns], {"rows": rows, "columns": columns}),
            "3d": (tensors["3d"][rows, middle, columns], {"rows": rows, "columns": columns, "middle": middle}),
        }
        for name, (part, given) in expected.items():
            taken = weights.take(name, **given)
            assert taken.dtype == torch.bfloat16
            assert weights.part_shape(name, **given) == taken.shape
            assert torch.equal(taken, part), (name, given)
            wide = torch.full(part.shape, torch.nan)
            weights.copy_to(wide, name, **given)
            assert torch.equal(wide, part.float())


def test_parts_beyond_tensor_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights = load_weights(tmp_path, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match="has no such dimension"):
        weights.take("1d", columns=slice(1))
    with pytest.raises(ValueError, match="has no such dimension"):
        weights.take("2d", middle=slice(1))
    with pytest.raises(ValueError, match=r"2d: the part is \[12, 2\], the place for it \[12, 1\]"):
        weights.copy_to(torch.empty(12, 1), "2d", columns=slice(2))


def test_progress_counts_bytes_read_by_rank(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    seen: list[tuple[int, int]] = []
    weights = load_weights(folder, shapes, lambda done, total: seen.append((done, total)))
    parts = [weights.take(name, rows=slice(weights.shape(name)[0] // 2)) for name in shapes]
    read = sum(part.nbytes for part in parts)
    assert seen[-1] == (read, read)
    shares = [done / total for done, total in seen]
    assert shares == sorted(shares)
    assert all(abs(total - read) < 0.01 * read for _, total in seen)


def test_no_page_of_the_file_stays_resident(tmp_path: Path) -> None:
    shape = (64 << 10, 256)
    save_file({"a": torch.ones(shape), "b": torch.ones(shape)}, tmp_path / "model.safetensors")
    resident: list[int] = []
    weights = load_weights(tmp_path, {"a": shape, "b": shape}, lambda done, total: resident.append(_resident_file()))
    before = _resident_file()
    weights.take("a")
    for start in range(0, 256, 64):
        weights.take("b", columns=slice(start, start + 64))
    # 64 MiB have been read; the last piece of 4 MiB may still be there.
    assert max(resident) - before < 8 << 20


def _resident_file() -> int:
    """Bytes of mapped files in this process's memory."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.split("RssFile:")[1].split()[0]) << 10


def test_kept_tensors_are_no_surplus(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    change(folder, **{"model.layers.1.eh_proj.weight": torch.zeros(2), "model.layers.10.a": torch.zeros(2)})
    with pytest.raises(ModelError) as error:
        load_weights(folder, shapes, kept=("model.layers.1.",))
    assert str(error.value).endswith("surplus model.layers.10.a")
    load_weights(folder, shapes, kept=("model.layers.1.", "model.layers.10."))


def test_headless_decoder_tensors_lack_prefix(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    whole = load_file(folder / "model.safetensors")
    alone = {name.removeprefix("model."): tensor for name, tensor in whole.items()}
    save_file({**alone, "layers.9.eh_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    weights = load_weights(folder, shapes, kept=("model.layers.9.",))
    assert all(torch.equal(weights.take(name), whole[name]) for name in shapes)
    optional = {"model.layers.9.eh_proj.weight": (2,), "model.layers.9.norm.weight": (2,)}
    assert "model.layers.9.eh_proj.weight" in load_weights(folder, shapes, optional=optional)
    with pytest.raises(ModelError, match=r"surplus layers\.9\.eh_proj\.weight$"):
        load_weights(folder, shapes)


def test_harmless_surplus_tensors_are_ignored(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    change(
        folder,
        **{"lm_head.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)},
    )
    assert "lm_head.weight" not in load_weights(folder, shapes)


def test_mismatched_tensors_are_named_in_one_error(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    change(
        folder,
        **{
            "model.norm.weight": torch.zeros(3),
            "model.layers.0.self_attn.q_norm.weight": None,
            "model.layers.0.self_attn.k_norm.weight": torch.zeros(24, dtype=torch.int8),
            "model.layers.7.extra": torch.zeros(1),
        },
    )
    with pytest.raises(ModelError) as error:
        load_weights(folder, shapes)
    message = str(error.value)
    assert "missing model.layers.0.self_attn.q_norm.weight" in message
    assert "surplus model.layers.7.extra" in message
    assert "model.norm.weight is [3], expected [64]" in message
    assert "k_norm.weight is I8" in message
    assert "\n" not in message


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    more = {f"model.more.{i}": (1,) for i in range(9)}
    with pytest.raises(ModelError, match=r"model\.more\.4 and 4 more"):
        load_weights(folder, shapes | more)


def test_unusable_weight_files_are_refused(tmp_path: Path) -> None:
    folder, shapes = make(tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-10], content[:5], b"\xff" * 64):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match="is damaged"):
            load_weights(folder, shapes)
    file.unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load_weights(folder, shapes)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match="only pickled weights"):
        load_weights(folder, shapes)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match="lacks model-00001-of-00002"):
        load_weights(folder, shapes)
    index.write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        load_weights(folder, shapes)


def test_digest_tells_checkpoints_apart(tmp_path: Path) -> None:
    one, _ = make(tmp_path / "one")
    same, _ = make(tmp_path / "same")
    other, _ = make(tmp_path / "other", seed=1)
    assert weights_digest(one) == weights_digest(same)
    assert weights_digest(one) != weights_digest(other)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert weights_digest(one) != weights_digest(same)


def test_digest_samples_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.weights.checkpoint.DIGEST_WHOLE_BYTES", 1000)
    monkeypatch.setattr("worker.weights.checkpoint.DIGEST_WINDOW_BYTES", 100)
    folder, _ = make(tmp_path)
    before = weights_digest(folder)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    for place in (10, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert weights_digest(folder) != before


@pytest.mark.parametrize("size", [0, 1000, 1 << 40, 2**64 - 1])
def test_digest_of_a_header_longer_than_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Former fault: the digest took as much memory as a file claimed to have."""
    monkeypatch.setattr("worker.weights.checkpoint.DIGEST_WHOLE_BYTES", 100)
    monkeypatch.setattr("worker.weights.checkpoint.DIGEST_WINDOW_BYTES", 100)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + bytes(500))
    if not size:
        assert weights_digest(tmp_path)
        return
    with pytest.raises(ModelError, match=r"is damaged \(its header has \d+ bytes; at most 508 are valid\)"):
        weights_digest(tmp_path)


def test_index_with_a_name_that_no_file_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(ModelError, match="lacks xxx"):
        load_weights(tmp_path, {})


@pytest.mark.parametrize("name", ["../outside.safetensors", "/outside.safetensors", "sub/inside.safetensors", "..", ""])
def test_index_with_files_outside_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Former fault: the worker served with weights from outside the checkpoint."""
    folder, shapes = make(tmp_path / "model")
    (tmp_path / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "sub").mkdir()
    (folder / "sub/inside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    named = str(tmp_path / "outside.safetensors") if name.startswith("/") else name
    index = {"weight_map": dict.fromkeys(shapes, named)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"files of the same folder are valid|not a regular file"):
        load_weights(folder, shapes)


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_non_regular_weight_files_are_refused(tmp_path: Path, kind: str) -> None:
    """Former fault: a link to /dev/zero took 8.7 GB, and a named pipe waited for ever."""
    folder, shapes = make(tmp_path)
    for file in ("model.safetensors", "model.safetensors.index.json"):
        path = folder / file
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
        for read in (lambda: load_weights(folder, shapes), lambda: weights_digest(folder)):
            with pytest.raises(ModelError):
                read()
        assert stored_names(folder) == frozenset()
        path.unlink()
