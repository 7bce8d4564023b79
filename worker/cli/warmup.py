"""`fissile worker warmup`: compiles the kernels that a worker's first requests would wait for.

AITER and Triton compile kernels when they are first called. A cold cache costs minutes; AITER's attention alone may
take twenty. So this command calls the kernels first, in a real engine: with the shapes of the model in config.json
(nothing else is read), as few layers as it has kinds, and zero weights, quantized as config.json says, in a sparse
file. Workers then find the compiled kernels in the same folders ($AITER_JIT_DIR, $TRITON_CACHE_DIR).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from common.cli.core.errors import CommandError
from common.cli.core.modes import ModalCommand
from common.cli.core.options import options
from common.config import Config
from common.errors import ApiError
from common.params.pooling import LAST
from common.telemetry.logs import setup_logging
from worker.cli.hub_models import command_model_folder
from worker.cli.worker_modes import FIXED_KV_MEMORY, ON_CPU
from worker.cli.worker_options import engine_options
from worker.config.model_config import ModelConfig, ModelError, read_config
from worker.ranks.rank_peers import RankLostError
from worker.server import WorkerOptions

if TYPE_CHECKING:
    from worker.llm_engine import LLMEngine

AITER: Final = "aiter"
JIT_FOLDER: Final = "AITER_JIT_DIR"
# Values of options of the engine that choose no kernels.
_WITHOUT_SCHEDULING: Final[dict[str, Any]] = {
    "weights_cache": "off",
    "prefix_caching": False,
    "scheduling_policy": Config.scheduling_policy,
}
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_HEADER_ALIGNMENT: Final = 8
_ANSWER: Final = 3
_SHORT_PROMPT: Final = 8


@dataclass(frozen=True)
class WarmupWork:
    """Requests that are computed together.

    Attributes:
        name: for people.
        prompts: number of prompts.
        length: of each, tokens.
        params: of all.
    """

    name: str
    prompts: int
    length: int
    params: Mapping[str, Any]


def blank_checkpoint(folder: Path, source: Path) -> int:
    """Writes a checkpoint of the model in `source` into `folder`. Returns its number of layers.

    Its weights are zeros that take no disk space.

    Args:
        folder: an existing folder.
        source: has a config.json, or is a GGUF file.

    Raises:
        ModelError: the model cannot be served.
    """
    # It imports PyTorch.
    from worker.model.architectures import model_class  # noqa: PLC0415
    from worker.weights.tensor_index import stored_as  # noqa: PLC0415

    whole = ModelConfig.from_folder(source)
    shapes = model_class(whole.architecture).tensor_shapes(whole)
    layers = num_layers(shapes, whole.source.get("layer_types"))
    config = _shortened(read_config(source)[1], layers)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    short = ModelConfig.from_folder(folder)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in model_class(short.architecture).tensor_shapes(short).items():
        tensors |= stored_as(name, shape, short.quant_config)
    _write_zeros(folder / "model.safetensors", tensors)
    return layers


def num_layers(shapes: Mapping[str, tuple[int, ...]], layer_types: object) -> int:
    """Length of the shortest prefix of layers that has every kind of layer; at least 2, because some models alternate.

    Args:
        shapes: of all tensors, by name.
        layer_types: config.json's list of them; anything else for none.
    """
    kinds: dict[int, set[object]] = {}
    for name, shape in shapes.items():
        if match := _LAYER.search(name):
            kinds.setdefault(int(match[1]), set()).add((name[match.end() :], shape))
    if isinstance(layer_types, list):
        for layer, kind in enumerate(layer_types[: len(kinds)]):
            kinds[layer].add(kind)
    first: dict[frozenset[object], int] = {}
    for layer in sorted(kinds):
        first.setdefault(frozenset(kinds[layer]), layer)
    return min(len(kinds), max(2, *(layer + 1 for layer in first.values())))


def _shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """config.json with fewer layers."""
    kept = {**config, "num_hidden_layers": layers}
    if isinstance(kept.get("layer_types"), list):
        kept["layer_types"] = kept["layer_types"][:layers]
    return kept


def _write_zeros(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Writes a safetensors file of these dtypes and shapes: a header, then a hole in place of the numbers."""
    # It imports PyTorch.
    from worker.weights.safetensors_file import DTYPES  # noqa: PLC0415

    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(stream.tell() + end)


def works(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, num_blocks: int, size: int
) -> list[WarmupWork]:
    """The steps that a worker will compute: the longest prompt of a step, one answer, and the most answers at once.

    Args:
        max_num_batched_tokens, max_num_seqs, max_model_len: as in Config.
        num_blocks: of the KV pool.
        size: tokens of a block.
    """
    longest = max(1, min(max_num_batched_tokens, max_model_len - _ANSWER))
    short = max(1, min(_SHORT_PROMPT, max_model_len - _ANSWER))
    at_once = max(1, min(max_num_seqs, num_blocks // -(-(short + _ANSWER) // size)))
    greedy = {"temperature": 0.0, "max_tokens": min(_ANSWER, max_model_len - longest), "ignore_eos": True}
    sampled = {**greedy, "temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}
    return [
        WarmupWork(f"prompt of {longest} tokens", 1, longest, greedy),
        WarmupWork(f"{at_once} answers at once", at_once, short, greedy),
        WarmupWork(f"{at_once} sampled answers at once", at_once, short, sampled),
    ]


def require_jit_folder(kernels: str, environment: Mapping[str, str]) -> None:
    """Refuses to compile AITER's kernels into a folder where workers would not find them.

    Raises:
        CommandError: AITER may be used, and $AITER_JIT_DIR is missing or cannot be written.
    """
    if kernels not in (AITER, "auto") or (kernels == "auto" and not _has_aiter()):
        return
    given = environment.get(JIT_FOLDER, "")
    if not given:
        raise CommandError(
            f"{JIT_FOLDER} is not set: name a folder that stays, such as {JIT_FOLDER}=/var/cache/aiter, here and for "
            "every worker; AITER keeps the kernels there that it compiles"
        )
    try:
        Path(given).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given):
            pass
    except OSError as error:
        raise CommandError(f"{JIT_FOLDER} {given} cannot be written: {error.strerror}") from None


def _has_aiter() -> bool:
    # It imports PyTorch.
    from kernels.aiter.library import AiterUnavailableError, find  # noqa: PLC0415

    try:
        find()
    except AiterUnavailableError:
        return False
    return True


@contextmanager
def _engine(options: WorkerOptions) -> Iterator[LLMEngine]:
    if options.threads is not None:
        # PyTorch reads it when imported; so do the ranks.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    from worker.llm_engine import LLMEngine  # noqa: PLC0415

    try:
        engine = LLMEngine(options.config)
    except (ApiError, ModelError) as error:
        raise CommandError(str(error)) from None
    except RankLostError as error:
        raise CommandError(f"the engine failed: {error}", 1) from error
    try:
        yield engine
    finally:
        engine.close()


def _compute(engine: LLMEngine, work: WarmupWork) -> float:
    """Computes the work. Returns its duration in seconds."""
    vocabulary = engine.io.model_config.vocab_size
    prompt = [token % vocabulary for token in range(work.length)]
    began = time.monotonic()
    if engine.io.model_config.generates:
        engine.generate([prompt] * work.prompts, work.params)
    else:
        engine.embed([prompt] * work.prompts, LAST)
    return time.monotonic() - began


def run(options: WorkerOptions) -> None:
    """Computes all work twice and reports its duration.

    Raises:
        CommandError: the model cannot be served with these options (exit code 2), or a rank ended (1).
    """
    began = time.monotonic()
    with _engine(options) as engine:
        click.echo(f"engine: {time.monotonic() - began:.1f} s")
        config = engine.config
        for work in works(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            config.max_model_len,
            config.num_kvcache_blocks,
            config.kv_cache_block_size,
        ):
            click.echo(f"{work.name}: ", nl=False)
            click.echo(f"first {_compute(engine, work):.2f} s, ", nl=False)
            click.echo(f"then {_compute(engine, work):.2f} s")


@click.command(
    cls=ModalCommand, modes=(ON_CPU, FIXED_KV_MEMORY), context_settings={"help_option_names": ["-h", "--help"]}
)
@options("worker warmup")
def warmup(log_level: str, model: str, **given: Any) -> None:
    """Compile the kernels that a worker with these options needs, before it is started.

    Reads only config.json of MODEL. With AITER's kernels, AITER_JIT_DIR must name a folder that the workers share.
    """
    setup_logging(log_level, service="warmup")
    require_jit_folder(given["kernels"], os.environ)
    try:
        source = command_model_folder(model, weights=False)
        with tempfile.TemporaryDirectory(prefix="fissile-warmup-") as folder:
            layers = blank_checkpoint(Path(folder), source)
            click.echo(f"model: {layers} layers of {model} with weights of zero")
            run(engine_options(given | _WITHOUT_SCHEDULING | {"model": folder}))
    except ModelError as error:
        raise CommandError(str(error)) from None
