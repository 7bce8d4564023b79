"""GPTQ, AWQ and pack-quantized checkpoints against the worth of their codes as tests/word_checkpoints.py packs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from structlog.testing import capture_logs

from common.config import Config
from common.params.sampling_params import SamplingParams
from kernels.grouped_weight import GroupedWeight
from kernels.quantized_weight import as_floats
from tests.checkpoints import make_checkpoint
from tests.covering import slow_but
from tests.parity.test_models import load_reference
from tests.quantizers import Floats, Stored, bf16, write_safetensors
from tests.unit.worker.model.test_sharded_models import on_ranks
from tests.unit.worker.weights.test_quantized_weights import TOKENS, logits, write_config
from tests.unit.worker.weights.test_stored_products import set_keeps
from tests.word_checkpoints import WORD_SCHEMES, WordScheme, nvfp4, pack_checkpoint
from tests.word_checkpoints import write_config as write_quantization
from worker.config.model_config import ModelConfig, ModelError
from worker.llm_engine import LLMEngine
from worker.weights.checkpoint import Weights, load_weights
from worker.weights.packed_words import unpacked
from worker.weights.stored_tensors import MatrixPart

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
ATTENTION = "model.layers.0.self_attn"
LAYER = "model.layers.0.mlp.down_proj"
NAME = f"{LAYER}.weight"
ROOT = Path(__file__).resolve().parents[4]
PROMPTS = [[7 + i, 300, 40 + i] * (1 + 3 * i) for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
PARTS = (slice(None), slice(5, 133), slice(129, 131), slice(37, 37))


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back ends keep codes and make floats of them when they pack."""
    set_keeps(monkeypatch, True)


def config(folder: Path) -> Config:
    return Config(model=str(folder), dtype="float32", num_kvcache_blocks=32, max_model_len=96)


def drawn(rows: int, columns: int) -> Floats:
    return np.random.default_rng(3).normal(size=(rows, columns)).astype(np.float32)


def write(folder: Path, scheme: WordScheme, tensors: dict[str, Stored]) -> Path:
    write_safetensors(folder / "model.safetensors", tensors)
    return write_config(folder, scheme.config)


def weights_of(folder: Path, shape: tuple[int, int]) -> Weights:
    return load_weights(folder, {NAME: shape}, quantization=ModelConfig.from_folder(folder).quant_config)


@pytest.mark.parametrize("name", list(WORD_SCHEMES))
def test_every_code_and_part_bit_for_bit(tmp_path: Path, name: str) -> None:
    scheme = WORD_SCHEMES[name]
    stored, worth = scheme.quantize(LAYER, drawn(160, 256))
    weights = weights_of(write(tmp_path, scheme, stored), (160, 256))
    assert np.array_equal(weights.take(NAME).numpy(), worth)
    for rows, columns in product(PARTS, PARTS):
        part = worth[rows, columns]
        out = torch.full(part.shape, torch.nan, dtype=torch.bfloat16)
        weights.copy_to(out, NAME, rows=rows, columns=columns)
        assert np.array_equal(out.float().numpy(), bf16(part)[1]), (rows, columns)
        if columns == slice(None):
            taken = weights.take_quantized(MatrixPart(NAME, rows))
            assert np.array_equal(as_floats(taken).numpy(), part)


@pytest.mark.parametrize(("name", "shape"), [("gptq", (64, 80)), ("awq", (64, 80)), ("compressed-tensors", (12, 96))])
def test_sizes_that_fill_no_group_or_word(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    scheme = WORD_SCHEMES[name]
    stored, worth = scheme.quantize(LAYER, drawn(*shape))
    assert np.array_equal(weights_of(write(tmp_path, scheme, stored), shape).take(NAME).numpy(), worth)


def test_columns_of_ranks_keep_codes_or_say_why(tmp_path: Path) -> None:
    for name, refusal in (("awq", None), ("gptq-act-order", "order by activation")):
        scheme = WORD_SCHEMES[name]
        stored, worth = scheme.quantize(LAYER, drawn(64, 256))
        weights = weights_of(write(tmp_path, scheme, stored), (64, 256))
        part = MatrixPart(NAME, columns=slice(128, 256))
        tensor = weights.quantized(NAME)
        assert tensor is not None
        if refusal is None:
            assert np.array_equal(as_floats(weights.take_quantized(part)).numpy(), worth[:, 128:])
        else:
            assert refusal in str(tensor.refusal(part))


# Made by compressed-tensors 0.20.0 (`pack_to_int32`), and by the packing code of AutoAWQ 0.2.9 (`WQLinear_GEMM`) and
# AutoGPTQ 0.7.1 (`qlinear_cuda.QuantLinear.pack`), of the codes below; GPTQ's with zero points equal to the codes.
CODES = [[(5 * row + 3 * column + row * column) % 15 + 1 for column in range(8)] for row in range(8)]
BY_ROWS = (1948100417, 1337409190, 459388443, -686142095, -1548433962, 2121096267, 1243075745, 380726038)
BY_COLUMNS = (1639324513, 441282980, -1262102809, 1834765114, 399810941, -1318381903, 1793293300, 343593287)
OF_AWQ = (1906593137, 1262155750, 380744043, -783844655, -1412615082, 1985277387, 1104848705, 459366838)
GPTQ_ZEROS = (1661769264,)


def test_words_of_published_packers() -> None:
    codes = torch.tensor(CODES, dtype=torch.uint8)
    by_rows, by_columns, awq, zeros = (
        torch.tensor(words, dtype=torch.int32) for words in (BY_ROWS, BY_COLUMNS, OF_AWQ, GPTQ_ZEROS)
    )
    assert torch.equal(unpacked(by_rows.view(8, 1), 4, dim=1), codes)
    assert torch.equal(unpacked(by_columns.view(1, 8), 4, dim=0), codes)
    # The same words are a row of GPTQ's `qweight`, [K / 8, N].
    assert torch.equal(unpacked(by_rows.view(1, 8), 4, dim=0).t(), codes)
    assert torch.equal(unpacked(awq.view(8, 1), 4, dim=1, places=(0, 4, 1, 5, 2, 6, 3, 7)), codes)
    assert torch.equal(unpacked(zeros.view(1, 1), 4, dim=1)[0] + 1, codes[0])


Change = Callable[[dict[str, Stored]], None]


def without(ending: str) -> Change:
    return lambda tensors: tensors.pop(LAYER + ending) and None


def instead(ending: str, dtype: str, array: Any) -> Change:
    return lambda tensors: tensors.update({LAYER + ending: (dtype, np.asarray(array))})


def order(groups: list[int]) -> Change:
    return instead(".g_idx", "I32", np.array(groups, np.int32))


def word(ending: str, value: int) -> Change:
    """Puts a value into the first word of a tensor."""

    def change(tensors: dict[str, Stored]) -> None:
        dtype, array = tensors[LAYER + ending]
        changed = array.copy()
        changed.flat[0] = value
        tensors[LAYER + ending] = (dtype, changed)

    return change


IN_ORDER = [0] * 32 + [1] * 32
SHUFFLED = IN_ORDER[::-1]
I32 = np.int32


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gptq", without(".qweight"), f"missing {LAYER}.weight"),
        ("gptq", without(".scales"), f"missing {LAYER}.scales"),
        ("gptq", without(".qzeros"), f"missing {LAYER}.qzeros"),
        ("gptq", without(".g_idx"), f"missing {LAYER}.g_idx"),
        ("gptq", instead(".qweight", "I32", np.zeros((4, 48), I32)), f"{LAYER}.qweight is [4, 48], expected [8, 48]"),
        ("gptq", instead(".qzeros", "I32", np.zeros((2, 5), I32)), f"{LAYER}.qzeros is [2, 5], expected [2, 6]"),
        ("gptq", instead(".scales", "F16", np.zeros((1, 48), np.float16)), f"{LAYER}.scales is [1, 48], expected [2, "),
        ("gptq", instead(".scales", "I8", np.zeros((2, 48), np.int8)), f"{LAYER}.scales is I8, expected F16, BF16 or "),
        ("gptq", instead(".g_idx", "I32", np.zeros(32, I32)), f"{LAYER}.g_idx is [32], expected [64]"),
        ("gptq", instead(".weight", "F32", np.zeros((48, 64), np.float32)), f"surplus {LAYER}.weight"),
        ("gptq", instead(".bias", "F16", np.ones(48, np.float16)), f"surplus {LAYER}.bias"),
        ("awq", instead(".g_idx", "I32", np.zeros(64, I32)), f"surplus {LAYER}.g_idx"),
        ("awq", instead(".qweight", "I32", np.zeros((8, 48), I32)), f"{LAYER}.qweight is [8, 48], expected [64, 6]"),
        ("awq", instead(".qweight", "I16", np.zeros((64, 6), np.int16)), f"{LAYER}.qweight is I16, expected I32"),
        ("compressed-tensors", without(".weight_scale"), f"missing {LAYER}.weight_scale"),
        (
            "compressed-tensors",
            instead(".weight_zero_point", "I32", np.zeros((6, 2), I32)),
            f"surplus {LAYER}.weight_zero_point",
        ),
        (
            "compressed-tensors",
            instead(".weight_shape", "F64", np.array([48, 64], np.float64)),
            f"{LAYER}.weight_shape is F64, expected I32 or I64",
        ),
        ("compressed-tensors-asymmetric-g128", without(".weight_zero_point"), f"missing {LAYER}.weight_zero_point"),
        ("compressed-tensors-act-order", without(".weight_g_idx"), f"missing {LAYER}.weight_g_idx"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, change: Change, problem: str) -> None:
    scheme = WORD_SCHEMES[name]
    stored, _ = scheme.quantize(LAYER, drawn(48, 64))
    change(stored)
    with pytest.raises(ModelError) as error:
        weights_of(write(tmp_path, scheme, stored), (48, 64))
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "compressed-tensors-asymmetric-g128"])
def test_sizes_of_config_reserve_no_memory(tmp_path: Path, name: str) -> None:
    """Petabytes, if anything were made of that size before it is compared with the file."""
    scheme = WORD_SCHEMES[name]
    stored, _ = scheme.quantize(LAYER, drawn(48, 64))
    with pytest.raises(ModelError, match=r"is \[.*\], expected \["):
        weights_of(write(tmp_path, scheme, stored), (1 << 25, 1 << 25))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gptq", order(SHUFFLED), "g_idx is not in order, but quantization_config says that columns are"),
        ("gptq-act-order", order([*IN_ORDER[:-1], 2]), "g_idx holds groups that do not exist; 0 to 1 are valid"),
        ("gptq-act-order", order([*IN_ORDER[:-1], -1]), "g_idx holds groups that do not exist; 0 to 1 are valid"),
        ("gptq-act-order", order([0] * 33 + [1] * 31), "g_idx has groups that are not of 32 columns"),
        ("gptq", word(".qzeros", 0xF), "qzeros holds a zero point of 16; at most 15 is valid"),
        ("gptq-8-bits", word(".qzeros", 0xFF), "qzeros holds a zero point of 256; at most 255 is valid"),
        ("gptq-sym-g128", word(".qzeros", 8), "zero points other than 8, but quantization_config says symmetric"),
        (
            "compressed-tensors",
            instead(".weight_shape", "I64", np.array([64, 48], np.int64)),
            "weight_shape is [64, 48]; [48, 64] is expected",
        ),
    ],
)
def test_contradicting_numbers_are_refused(tmp_path: Path, name: str, change: Change, problem: str) -> None:
    scheme = WORD_SCHEMES[name]
    stored, _ = scheme.quantize(LAYER, drawn(48, 64))
    change(stored)
    weights = weights_of(write(tmp_path, scheme, stored), (48, 64))
    with pytest.raises(ModelError) as error:
        weights.take(NAME)
    assert problem in str(error.value)
    assert str(error.value).startswith(LAYER)


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
def test_missing_quantization_config_is_named(tmp_path: Path, name: str) -> None:
    """Old repositories have it in a file of its own, such as quantize_config.json."""
    stored, _ = WORD_SCHEMES[name].quantize(LAYER, drawn(48, 64))
    write_safetensors(tmp_path / "model.safetensors", stored)
    with pytest.raises(ModelError, match=r"they are quantized, but config\.json has no quantization_config"):
        load_weights(tmp_path, {NAME: (48, 64)})


def test_biases_of_zeros_beside_codes_are_no_surplus(tmp_path: Path) -> None:
    """AutoGPTQ wrote them for models without biases."""
    scheme = WORD_SCHEMES["gptq"]
    stored, worth = scheme.quantize(LAYER, drawn(48, 64))
    stored[f"{LAYER}.bias"] = ("F16", np.zeros(48, np.float16))
    assert np.array_equal(weights_of(write(tmp_path, scheme, stored), (48, 64)).take(NAME).numpy(), worth)


def test_static_groups_with_desc_act_are_in_order(tmp_path: Path) -> None:
    """With `static_groups` columns are put back, so that `desc_act` changes no tensor."""
    scheme = WORD_SCHEMES["gptq"]
    stored, worth = scheme.quantize(LAYER, drawn(48, 64))
    write(tmp_path, scheme, stored)
    write_config(tmp_path, {**scheme.config, "desc_act": True, "static_groups": True})
    weights = weights_of(tmp_path, (48, 64))
    assert np.array_equal(weights.take(NAME).numpy(), worth)
    taken = weights.take_quantized(MatrixPart(NAME))
    assert isinstance(taken, GroupedWeight)
    assert taken.order is None


def test_layers_with_other_settings(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`, and groups of compressed-tensors' config."""
    eight, four = WORD_SCHEMES["gptq-8-bits"], WORD_SCHEMES["gptq"]
    other = "model.layers.1.mlp.down_proj"
    stored, worth = four.quantize(LAYER, drawn(48, 64))
    more, other_worth = eight.quantize(other, drawn(48, 64))
    write(tmp_path, four, stored | more)
    dynamic = {r"+:.*layers\.1\..*": {"bits": 8, "sym": True}, r"-:.*layers\.2\..*": {}}
    write_config(tmp_path, {**four.config, "dynamic": dynamic})
    config = ModelConfig.from_folder(tmp_path).quant_config
    weights = load_weights(tmp_path, {NAME: (48, 64), f"{other}.weight": (48, 64)}, quantization=config)
    assert np.array_equal(weights.take(NAME).numpy(), worth)
    assert np.array_equal(weights.take(f"{other}.weight").numpy(), other_worth)
    assert config.of_layer("model.layers.2.mlp.up_proj").quant_type == "no"


def made(folder: Path, scheme: str, architecture: str = "qwen3", *, also: str = "", **shape: Any) -> None:
    """A packed checkpoint, and beside it one of floats with the same worth; `also` is packed too."""
    make_checkpoint(folder / "packed", architecture, **SHAPE | shape)
    worths = pack_checkpoint(folder / "packed", WORD_SCHEMES[scheme], also)
    shutil.copytree(folder / "packed", folder / "worth")
    write_safetensors(folder / "worth" / "model.safetensors", {name: ("F32", w) for name, w in worths.items()})
    config = json.loads((folder / "worth" / "config.json").read_text())
    del config["quantization_config"]
    (folder / "worth" / "config.json").write_text(json.dumps(config))


def log_probs(folder: Path, **given: Any) -> torch.Tensor:
    return logits(folder, **given).double().log_softmax(-1)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a share of the largest log probability, for two sums in float32 of different orders."""
    return float((found - expected).abs().max() / expected.abs().max())


def reasons(folder: Path, **given: Any) -> tuple[int, int, str]:
    """How many quantized tensors stay and are dequantized, and why."""
    with capture_logs() as lines:
        logits(folder, **given)
    (line,) = (each for each in lines if each["event"] == "quantized weights")
    return line["kept"], line["dequantized"], line["reasons"]


MODELS = [
    ("qwen3", "gptq"),
    ("qwen3", "gptq-act-order"),
    ("qwen2", "gptq-sym-g128"),
    ("qwen2", "gptq-v2-8-bits-act-order"),
    ("llama", "awq-g128"),
    ("qwen3", "compressed-tensors"),
    ("llama", "compressed-tensors-asymmetric-g128"),
    ("qwen2", "compressed-tensors-channel"),
    ("qwen3_moe", "gptq"),
    ("mixtral", "awq"),
    ("mixtral", "gptq-act-order"),
    ("phi3", "gptq-act-order"),
]


@pytest.mark.parametrize("model", slow_but({MODELS[1], MODELS[4], MODELS[10]}, MODELS), ids=" ".join)
def test_models_equal_those_of_dequantized_weights(tmp_path: Path, model: tuple[str, str]) -> None:
    """Log probabilities to 1e-5, or to three times the error of the same weights in transformers and float32; and
    greedy tokens. A request alone has the bits of one in a batch.
    """
    architecture, scheme = model
    made(tmp_path, scheme, architecture, num_hidden_layers=2)
    floats, exact = load_reference(tmp_path / "worth").log_probs(TOKENS)
    error = (log_probs(tmp_path / "packed")[-1] - exact).abs().max()
    assert error < max(1e-5, 3 * float((floats - exact).abs().max()))
    engines = [LLMEngine(config(tmp_path / name)) for name in ("worth", "packed")]
    answers = [[(one["token_ids"], one["logprobs"]) for one in engine.generate(PROMPTS, GREEDY)] for engine in engines]
    assert [ids for ids, _ in answers[0]] == [ids for ids, _ in answers[1]]
    for prompt, batched in zip(PROMPTS, answers[1], strict=True):
        (alone,) = engines[1].generate([prompt], GREEDY)
        assert (alone["token_ids"], alone["logprobs"]) == batched


@pytest.mark.parametrize(
    ("architecture", "scheme", "kept"),
    [
        ("qwen3", "gptq", 7),
        ("qwen2", "gptq-act-order", 7),
        ("llama", "awq-channel", 7),
        ("phi3", "compressed-tensors-asymmetric-g128", 4),
        ("qwen3_moe", "compressed-tensors", 4 + 7 * 3),
        ("mixtral", "gptq-act-order", 4 + 5 * 3),
    ],
)
def test_products_keep_codes(tmp_path: Path, keeps_all: None, architecture: str, scheme: str, kept: int) -> None:
    made(tmp_path, scheme, architecture)
    found = reasons(tmp_path / "packed", kernels="torch")
    assert found[:2] == (kept, 0), found
    packed, worth = (logits(tmp_path / name, kernels="torch") for name in ("packed", "worth"))
    assert torch.equal(packed, worth)


def test_rank_columns_that_cut_an_order_are_dequantized(tmp_path: Path, keeps_all: None) -> None:
    made(tmp_path, "gptq-act-order", intermediate_size=512)
    with capture_logs() as lines:
        first, _ = on_ranks(tmp_path / "packed", 2, False)
    used = [(line["kept"], line["dequantized"]) for line in lines if line["event"] == "quantized weights"]
    # o_proj and down_proj.
    assert used == [(5, 2)] * 2
    expected = on_ranks(tmp_path / "worth", 2, False)[0].double().log_softmax(-1)
    assert difference(first.double().log_softmax(-1), expected) < 1e-5


@pytest.mark.parametrize("scheme", slow_but({"gptq-act-order", "awq"}, list(WORD_SCHEMES)))
def test_two_ranks_equal_one_with_dequantized_weights(tmp_path: Path, scheme: str) -> None:
    made(tmp_path, scheme, num_hidden_layers=2, intermediate_size=512)
    first, second = on_ranks(tmp_path / "packed", 2, False)
    assert torch.equal(first, second)
    expected = on_ranks(tmp_path / "worth", 2, False)[0].double().log_softmax(-1)
    assert difference(first.double().log_softmax(-1), expected) < 1e-5


def test_packed_weights_cache_has_equal_bits(tmp_path: Path) -> None:
    made(tmp_path, "gptq-act-order")
    cache = str(tmp_path / "cache")
    first = logits(tmp_path / "packed", weights_cache=cache)
    assert len(list((tmp_path / "cache").glob("*.weights"))) == 1
    assert torch.equal(logits(tmp_path / "packed", weights_cache=cache), first)
    assert torch.equal(logits(tmp_path / "packed"), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bits": 3}, "weights of 3 bits are not supported; supported: 4, 8"),
        ({"sym": True}, "qzeros holds zero points other than 8, but quantization_config says symmetric"),
        ({"group_size": 64}, "model.layers.0.mlp.down_proj.scales is [12, 256], expected [6, 256]"),
        ({"quant_method": "awq", "checkpoint_format": "gemm"}, "surplus model.layers.0.mlp.down_proj.g_idx"),
    ],
)
def test_worker_refuses_contradictions_with_exit_code_2(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    made(tmp_path, "gptq")
    folder = tmp_path / "packed"
    spec = json.loads((folder / "config.json").read_text())["quantization_config"]
    write_quantization(folder, {**spec, **change})
    command = [sys.executable, "-m", "worker", "--model", str(folder), "--port", "0", "--dtype", "float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert problem in last
    assert "Traceback" not in done.stderr


NVFP4 = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "dynamic": "local"},
            }
        },
        "ignore": ["lm_head"],
    },
}


@pytest.mark.parametrize("method", list(NVFP4))
def test_nvfp4_numbers_and_parts_bit_for_bit(tmp_path: Path, method: str) -> None:
    is_modelopt = method == "modelopt"
    stored, worth = nvfp4(NAME, drawn(48, 96), is_modelopt=is_modelopt)
    stored[f"{LAYER}.input_scale" if is_modelopt else f"{LAYER}.input_global_scale"] = ("F32", np.ones(1, np.float32))
    write_safetensors(tmp_path / "model.safetensors", stored)
    weights = weights_of(write_config(tmp_path, NVFP4[method]), (48, 96))
    assert np.array_equal(weights.take(NAME).numpy(), worth)
    for rows, columns in product((slice(None), slice(5, 41)), (slice(None), slice(32, 80))):
        taken = weights.take_quantized(MatrixPart(NAME, rows, columns))
        assert isinstance(taken, GroupedWeight)
        assert np.array_equal(as_floats(taken).numpy(), worth[rows, columns])


@pytest.mark.parametrize(
    ("ending", "change", "problem"),
    [
        ("_scale_2", None, f"missing {NAME}_scale_2"),
        ("_scale", ("F8_E4M3", np.ones((48, 3), np.uint8)), f"{NAME}_scale is [48, 3], expected [48, 6]"),
        ("_scale", ("F32", np.ones((48, 6), np.float32)), f"{NAME}_scale is F32, expected F8_E4M3"),
        ("_scale_2", ("F32", np.ones(48, np.float32)), f"{NAME}_scale_2 is [48], expected []"),
        ("", ("U8", np.ones((48, 96), np.uint8)), f"{NAME} is [48, 96], expected [48, 48]"),
    ],
)
def test_nvfp4_tensors_that_do_not_fit_are_named(
    tmp_path: Path, ending: str, change: Stored | None, problem: str
) -> None:
    stored, _ = nvfp4(NAME, drawn(48, 96), is_modelopt=True)
    changed = {name: tensor for name, tensor in ({**stored, NAME + ending: change}).items() if tensor is not None}
    write_safetensors(tmp_path / "model.safetensors", changed)
    with pytest.raises(ModelError) as error:
        weights_of(write_config(tmp_path, NVFP4["modelopt"]), (48, 96))
    assert problem in str(error.value)


def test_parts_in_different_orders_are_dequantized_and_named(tmp_path: Path, keeps_all: None) -> None:
    """Projections of one input may have been quantized one by one."""
    made(tmp_path, "gptq-act-order")
    file = tmp_path / "packed" / "model.safetensors"
    stored, k_worth = WORD_SCHEMES["gptq-act-order"].quantize(f"{ATTENTION}.k_proj", drawn(128, 256), seed=1)
    save_file(load_file(file) | {name: array for name, (_, array) in stored.items()}, file)
    file = tmp_path / "worth" / "model.safetensors"
    save_file(load_file(file) | {f"{ATTENTION}.k_proj.weight": k_worth}, file)
    found = reasons(tmp_path / "packed", kernels="torch")
    assert found[:2] == (4, 3)
    assert "parts of the product order their columns differently: 3" in found[2]
    packed, worth = (logits(tmp_path / name, kernels="torch") for name in ("packed", "worth"))
    assert torch.equal(packed, worth)


def test_head_in_codes_is_served(tmp_path: Path) -> None:
    """`lm_head` of GPTQ."""
    made(tmp_path, "gptq", also="lm_head.weight")
    expected, found = log_probs(tmp_path / "worth"), log_probs(tmp_path / "packed")
    assert difference(found, expected) < 1e-5
