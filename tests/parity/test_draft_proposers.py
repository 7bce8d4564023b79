"""Draft models in the engine: streams equal plain decoding, drafts equal an independent model's.

A draft is a function of the tokens before it, whatever its sequence met: chunks, prefix hits, preemptions, wrong
drafts. KV caches start full of NaN, so that a read of an unwritten slot is detected.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import MIXED, PREFILL_FIRST, Config, ParallelConfig, SpeculativeConfig
from common.constraints.forms import Constraint
from common.params.config_parts import DRAFT_MODEL, EAGLE3, MTP
from common.params.logprobs import PROCESSED
from common.params.sampling_params import SamplingParams
from kernels.interface import SampleParams
from kernels.select import select_backend
from tests.checkpoints import make_checkpoint, make_eagle3_head, make_mtp_checkpoint
from tests.covering import slow_but
from tests.parity.draws import changes_of_logits
from tests.parity.test_draft_models import ReferenceHead, ReferenceMtp
from tests.parity.test_equality import poisoned
from tests.parity.test_ranks import BLOCK_SIZE, Ranks
from tests.unit.mutants import OBJECTIONS, Mutant
from worker.config.model_config import ModelConfig, ModelError
from worker.engine.batch import ScheduledBatch
from worker.engine.sequence import Sequence
from worker.llm_engine import LLMEngine
from worker.model import model_runner
from worker.model.model_runner import ModelRunner
from worker.model.models.eagle3 import NUM_AUX
from worker.model.speculation.draft_proposer import SampledStep
from worker.model.speculation.model_proposers import ModelProposer, SmallModelProposer, StepRows

K: Final = 3
NUM_IDS: Final = 384
# Sums in another order may swap two ids of nearly equal logits, and all drafts after them.
MOST_SWAPPED: Final = 0.01
# A reference's states [n, H] of the tokens 1 and on and the states before them, and its logits.
Draft = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Proposed:
    """The drafts after the first `count` tokens of a sequence."""

    seq: Sequence
    count: int
    drafts: list[int]


@dataclass(frozen=True)
class Case:
    """A model that drafts, and its reference: of whole sequences the states that it takes in, its own, and logits."""

    config: Config
    states: Callable[[torch.Tensor], torch.Tensor]
    draft: Draft
    logits: Callable[[torch.Tensor], torch.Tensor]


def eagle(tmp_path: Path, architecture: str, **shape: Any) -> Case:
    folder = make_checkpoint(tmp_path / "target", architecture, **shape)
    return eagle_case(folder, make_eagle3_head(tmp_path / "head", folder))


def eagle_case(folder: Path, head: Path) -> Case:
    """A model and an EAGLE-3 head that are there."""
    from transformers import AutoModelForCausalLM

    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = ReferenceHead(head, hf.get_input_embeddings().weight.detach())
    reference.weights |= {name: each.float() for name, each in reference.weights.items() if each.is_floating_point()}
    count = hf.config.num_hidden_layers
    layers = reference.config.get("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
    assert len(layers) == NUM_AUX

    def states(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = hf(tokens[None], output_hidden_states=True).hidden_states
        return reference.linear("fc", torch.cat([hidden[layer][0] for layer in layers], dim=1))

    spec = SpeculativeConfig(K, EAGLE3, str(head), adaptive=False)
    return Case(Config(model=str(folder), speculative_config=spec), states, reference, reference.logits)


def mtp(tmp_path: Path, architecture: str) -> Case:
    folder = make_mtp_checkpoint(tmp_path / "model", architecture, num_hidden_layers=2)
    source = json.loads((folder / "config.json").read_text())
    counted = source | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    counted |= {key: [*source[key], source[key][-1]] for key in ("layer_types", "mlp_layer_types") if source.get(key)}
    (folder / "config.json").write_text(json.dumps(counted))
    reference = ReferenceMtp(folder, source)
    (folder / "config.json").write_text(json.dumps(source))
    layers = list(reference.target.layers)

    def states(tokens: torch.Tensor) -> torch.Tensor:
        return reference.run(layers, reference.target_norm, input_ids=tokens[None])

    config = Config(model=str(folder), speculative_config=SpeculativeConfig(K, MTP, adaptive=False))
    return Case(config, states, reference, reference.logits)


def small(tmp_path: Path, architecture: str) -> Case:
    """A model of its own, which sees a token more: the state in front of which a draft is made is that of the token."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "target", "qwen3")
    own = make_checkpoint(tmp_path / "own", architecture, seed=5, num_hidden_layers=2)
    hf: Any = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32)

    def draft(tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        # The first token is none of these: its id stands where a head has a state.
        every = torch.cat((states[0, :1].long(), tokens))
        with torch.no_grad():
            made: torch.Tensor = hf(every[None]).logits[0]
        return made[1:]

    def states(tokens: torch.Tensor) -> torch.Tensor:
        return tokens[0].float().expand(len(tokens), NUM_IDS)

    spec = SpeculativeConfig(K, DRAFT_MODEL, str(own), adaptive=False)
    return Case(Config(model=str(folder), speculative_config=spec), states, draft, lambda made: made)


CASES: Final[dict[str, Callable[[Path], Case]]] = {
    "eagle3 qwen3": lambda path: eagle(path, "qwen3"),
    "eagle3 llama": lambda path: eagle(path, "llama", num_hidden_layers=5, tie_word_embeddings=False),
    "mtp deepseek_v3": lambda path: mtp(path, "deepseek_v3"),
    "mtp deepseek_v32": lambda path: mtp(path, "deepseek_v32"),
    "mtp glm4_moe": lambda path: mtp(path, "glm4_moe"),
    "draft_model llama": lambda path: small(path, "llama"),
    "draft_model deepseek_v32": lambda path: small(path, "deepseek_v32"),
}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "chunked": {"max_num_batched_tokens": 9, "scheduling_policy": MIXED},
    "preempted": {"num_kvcache_blocks": 96, "kv_cache_block_size": 1, "scheduling_policy": PREFILL_FIRST},
    "deferred and cached": {"deferred_output": True, "enable_prefix_caching": True},
}


@pytest.fixture
def nan_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "select_backend", lambda *choice: poisoned(select_backend(*choice)))


@pytest.mark.usefixtures("nan_caches")
@pytest.mark.parametrize("name", slow_but({"eagle3 qwen3", "mtp glm4_moe", "draft_model llama"}, list(CASES)))
def test_streams_and_drafts(name: str, tmp_path: Path) -> None:
    case, seen = CASES[name](tmp_path), Counter[str]()
    for setting in SETTINGS:
        _check(case, setting, seen)
    assert 0 < seen["accepted"] < seen["drafts"]
    assert seen["preemptions"] > 0
    assert seen["hits"] > 0


def _check(case: Case, setting: str, seen: Counter[str]) -> None:
    config = replace(
        case.config, **{"dtype": "float32", "max_model_len": 96, "num_kvcache_blocks": 40, **SETTINGS[setting]}
    )
    prompts, params = _requests(random.Random(setting))
    found: list[Proposed] = []
    drafting = LLMEngine(config, runner=recording(loaded(config), found))
    answers = drafting.generate(prompts, params)
    config = replace(config, speculative_config=None)
    plain = LLMEngine(config, runner=loaded(config))
    assert _streams(answers) == _streams(plain.generate(prompts, params)), setting
    _compare(case, [each for each in found if not _is_steered(each.seq)])
    stats = drafting.core.scheduler.spec_stats
    seen["accepted"] += stats.total_accepted_tokens
    seen["drafts"] += stats.total_draft_tokens
    seen["preemptions"] += drafting.core.scheduler.lifecycle.num_preemptions
    seen["hits"] += sum(proposed.seq.num_cached_tokens > 0 for proposed in found)
    drafting.close()
    plain.close()


MUTANTS = [
    Mutant("rows of wrong drafts", SampledStep, "right_rows", "-= num_rejected", "-= 0"),
    Mutant("nothing behind a chunk", SampledStep, "next_tokens", "known.get(seq_id, 0)", "0"),
    Mutant("noise of the first draft", ModelProposer, "_draw", "+ 1 + len(drafts)", "+ 1"),
    Mutant("a place before", ModelProposer, "_chain", "ends[own], last", "ends[own] - 1, last"),
    Mutant("the newest token is another", StepRows, "with_newest", "np.array(step.next_tokens, np.int64)[more > 0]",
           "5"),
    Mutant("states of another row", StepRows, "behind", "(step.begins - (ends - counts)", "(-(ends - counts)"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.trap)
def test_fault_is_detected(mutant: Mutant, tmp_path: Path) -> None:
    # A head makes all drafts of a step in one operation, from the step's data.
    names: dict[type, str] = {SampledStep: "eagle3 qwen3", ModelProposer: "mtp glm4_moe", StepRows: "mtp glm4_moe"}
    assert isinstance(mutant.owner, type)
    case = CASES["draft_model llama" if mutant.name == "with_newest" else names[mutant.owner]](tmp_path)
    with mutant.applied(), pytest.raises(OBJECTIONS):
        _check(case, "chunked", Counter())


def _requests(rnd: random.Random) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Prompts, each twice, the second of them with parameters that change logits."""
    prompts = [[rnd.randrange(5, 300) for _ in range(rnd.randint(2, 50))] for _ in range(3)]
    params: list[dict[str, Any]] = [
        {"temperature": t, "seed": rnd.randrange(2**64), "max_tokens": 24, "ignore_eos": True} for t in (0.0, 2.0, 1.0)
    ]
    changed = [one | {"logprobs": 1} | changes_of_logits(rnd, 0.4, 300) for one in params]
    return prompts * 2, params + changed


def _is_steered(seq: Sequence) -> bool:
    return seq.sampling_params.logprobs is not None


def _streams(answers: list[dict[str, Any]]) -> list[list[Any]]:
    return [[one.get(name) for name in ("token_ids", "finish_reason", "logprobs")] for one in answers]


def loaded(config: Config) -> ModelRunner:
    runner = ModelRunner(config, ModelConfig.from_folder(config.model))
    runner.allocate_kv_cache(config.num_kvcache_blocks)
    return runner


def recording(runner: ModelRunner, found: list[Proposed]) -> ModelRunner:
    """The runner, which records the drafts after each token and asserts that no unwritten slot is read."""
    proposer = runner.draft_proposer
    assert proposer is not None
    propose = proposer.propose

    def noting(step: SampledStep) -> dict[int, list[int]]:
        drafts = propose(step)
        for i, seq in enumerate(step.batch.columns.rows):
            wanted = step.batch.drafts_wanted.get(seq.id, 0)
            own = drafts.get(seq.id, [])
            # A model that sees the newest token has a row more.
            room = step.batch.num_slots(i) - step.num_tokens(i) + 2 if wanted else 0
            room -= isinstance(proposer, SmallModelProposer)
            assert len(own) == max(0, min(wanted, room))
            if own:
                found.append(Proposed(seq, step.num_tokens(i), own))
        return drafts

    proposer.propose = noting  # type: ignore[method-assign]
    return runner


def _compare(case: Case, found: list[Proposed]) -> None:
    num_swapped = sum(drafts != each.drafts for each, drafts in independent_drafts(case, found))
    assert found
    assert num_swapped <= MOST_SWAPPED * len(found), f"{num_swapped} of {len(found)}"


def independent_drafts(case: Case, found: list[Proposed]) -> Iterator[tuple[Proposed, list[int]]]:
    """The reference's drafts at the same places, equally many."""
    sampling = select_backend("torch").sampling
    known = {each.seq.id: case.states(torch.tensor(each.seq.token_ids)) for each in found}
    zeros = np.zeros(1, np.int64)
    for each in found:
        seq, tokens = each.seq, each.seq.token_ids[: each.count]
        states, expected = known[seq.id][: each.count - 1], list[int]()
        for position in range(each.count, each.count + len(each.drafts)):
            made = case.draft(torch.tensor([*tokens[1:], *expected]), states)
            temperature = np.array([seq.sampling_params.temperature], np.float32)
            params = SampleParams(temperature, zeros, zeros.astype(np.float32) + 1, zeros.astype(np.float32))
            seeds, places = np.array([seq.seed], np.uint64), np.array([position], np.int64)
            drawn = sampling.sample(case.logits(made[-1:]), params, seeds, places, zeros)
            expected.append(int(drawn))
            states = torch.cat((states, made[-1:]))
        yield each, expected


def test_drafts_of_target_model_are_always_accepted(tmp_path: Path) -> None:
    """With penalties and masks too: drafts are sampled like tokens."""
    folder = make_checkpoint(tmp_path / "model")
    # Longer by rows that no token has.
    padded = make_checkpoint(tmp_path / "other", vocab_size=400, tokenizer=False)
    weights, more = load_file(folder / "model.safetensors"), load_file(padded / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(weights | {name: torch.cat((weights[name], more[name][384:]))}, padded / "model.safetensors")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, padded)
    spec = SpeculativeConfig(K, DRAFT_MODEL, str(padded), adaptive=False)
    engine = LLMEngine(
        Config(model=str(folder), dtype="float32", max_model_len=96, num_kvcache_blocks=60, speculative_config=spec)
    )
    engine.generate(*_requests(random.Random(4)))
    stats = engine.core.scheduler.spec_stats
    assert stats.total_accepted_tokens == stats.total_draft_tokens > 0
    engine.close()


REGEX: Final = Constraint("regex", ("[a-z]{3,20}( [0-9]{2,9}){1,3}",))
SCHEMA: Final = Constraint(
    "json_schema",
    ('{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}',),
)
# Parameters of a request, by the field of SamplingParams that they set, or by several fields.
STEERED: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": -0.5},
    "seed": {"seed": 5},
    "max_tokens": {"max_tokens": 17},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(100, 160))},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {2: 3.0}},
    "stop_strings": {"stop_strings": ("q",)},
    "include_stop_string": {"include_stop_string": True, "stop_strings": ("q",)},
    "stop_token_ids": {"stop_token_ids": (90, 91)},
    "stop_token_sequences": {"stop_token_sequences": ((90, 91),)},
    "n": {"n": 2},
    "logit_bias": {"logit_bias": {50: 5.0, 60: -5.0}},
    "bad_words": {"bad_words": ("e", "th")},
    "bad_words_token_ids": {"bad_words_token_ids": ((100,), (101, 102))},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(5, 200))},
    "logprobs": {"logprobs": 2},
    "logprob_token_ids": {"logprobs": 0, "logprob_token_ids": (7,)},
    "logprobs_kind": {"logprobs": 1, "logprobs_kind": PROCESSED},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprobs_start": {"prompt_logprobs": 1, "prompt_logprobs_start": 2},
    "num_drafts": {"num_drafts": 2},
    "constraint": {"constraint": REGEX},
    "constraint, greedy": {"constraint": REGEX, "temperature": 0.0},
    "constraint, JSON": {"constraint": SCHEMA},
    "constraint, allowed_token_ids": {"constraint": REGEX, "allowed_token_ids": tuple(range(5, 330))},
    "constraint, bad_words": {"constraint": REGEX, "bad_words": ("e", "1"), "bad_words_token_ids": ((72, 73),)},
    "constraint, min_tokens": {"constraint": REGEX, "min_tokens": 25},
    "constraint, ignore_eos": {"constraint": REGEX, "ignore_eos": True},
    "constraint, penalties": {"constraint": SCHEMA, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
}


def test_drafts_of_same_model_are_accepted_with_each_parameter(tmp_path: Path) -> None:
    """Drafts of a model followed neither grammars nor the other limits of a row with a grammar."""
    # Routers and the library make the grammar from a constraint.
    assert set(STEERED) >= {field.name for field in fields(SamplingParams)} - {"grammar"}
    folder = make_checkpoint(tmp_path, max_position_embeddings=512)
    options: dict[str, Any] = {"model": str(folder), "dtype": "float32", "max_model_len": 96, "num_kvcache_blocks": 200}
    spec = SpeculativeConfig(K, DRAFT_MODEL, str(folder), adaptive=False)
    drafting, plain = LLMEngine(Config(speculative_config=spec, **options)), LLMEngine(Config(**options))
    # Forced texts are off, because they only guess how a text is cut into tokens.
    drafting.core.runner.forces = False  # type: ignore[attr-defined]
    prompts, wrong = [[30 + i, 40, 50 + i] for i in range(6)], dict[str, tuple[int, int]]()
    for name, given in STEERED.items():
        stats = drafting.core.scheduler.spec_stats
        before = stats.total_accepted_tokens, stats.total_draft_tokens
        requests = [{"max_tokens": 30, "seed": i, **given} for i in range(len(prompts))]
        answers = [engine.generate(prompts, requests) for engine in (drafting, plain)]
        assert _streams(answers[0]) == _streams(answers[1]), name
        accepted, made = stats.total_accepted_tokens - before[0], stats.total_draft_tokens - before[1]
        if not accepted or accepted != made:
            wrong[name] = accepted, made
    assert wrong == {}
    drafting.close()
    plain.close()


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("method", slow_but({DRAFT_MODEL}, [MTP, DRAFT_MODEL]))
def test_drafts_end_at_model_length(tmp_path: Path, method: str, is_deferred: bool) -> None:
    """Its longest sequence ends within a block: there are slots after it, but no rotary angles for their positions."""
    if method == MTP:
        folder, spec = make_mtp_checkpoint(tmp_path / "model", "glm4_moe"), SpeculativeConfig(7, MTP, adaptive=False)
    else:
        folder = make_checkpoint(tmp_path / "model")
        spec = SpeculativeConfig(7, DRAFT_MODEL, str(folder), adaptive=False)
    config = Config(model=str(folder), dtype="float32", num_kvcache_blocks=60, speculative_config=spec)
    for length in range(97, 103):
        engine = LLMEngine(replace(config, max_model_len=length, deferred_output=is_deferred))
        prompts = [[5 + i] * (length - 24 - i) for i in range(4)]
        answers = engine.generate(prompts, [{"temperature": 0.0, "max_tokens": 99, "ignore_eos": True}] * 4)
        assert [len(answer["token_ids"]) for answer in answers] == [24 + i for i in range(4)]
        engine.close()


@pytest.mark.parametrize("missing", [False, True])
def test_draft_model_with_other_tokenizer_is_refused(tmp_path: Path, missing: bool) -> None:
    folder = make_checkpoint(tmp_path / "model")
    other = make_checkpoint(tmp_path / "other", vocab_size=400, num_hidden_layers=1)
    if missing:
        (other / "tokenizer.json").unlink()
    message = f"speculative_config.model {other}: its tokenizer differs from the model's; use a draft model"
    _refused(folder, SpeculativeConfig(K, DRAFT_MODEL, str(other)), message)


@pytest.mark.slow
def test_ranks_draft_alike(tmp_path: Path) -> None:
    """Each rank has its heads of the draft model, and draws the same drafts from all of its logits."""
    target = make_checkpoint(tmp_path / "target")
    head = make_eagle3_head(tmp_path / "head", target, num_attention_heads=4, num_key_value_heads=2)
    mtp_model = make_mtp_checkpoint(tmp_path / "mtp", "deepseek_v3", num_hidden_layers=2)
    for folder, spec in (
        (target, SpeculativeConfig(K, EAGLE3, str(head), adaptive=False)),
        (mtp_model, SpeculativeConfig(K, MTP, adaptive=False)),
        (target, SpeculativeConfig(K, DRAFT_MODEL, str(make_checkpoint(tmp_path / "small", seed=3)), adaptive=False)),
    ):
        one, two = (Ranks(folder, size, speculative_config=spec) for size in (1, 2))
        outputs = []
        for ranks, stays in ((one, False), (two, False), (two, True)):
            for runner in ranks.runners:
                # As on GPUs, where no launch waits for the token before the drafts.
                runner.sampler.waits_for_tokens = stays
            seq = Sequence(list(range(5, 45)), BLOCK_SIZE, SamplingParams(temperature=1.0), seed=7)
            seq.block_table = [3, 1, 2]
            batch = ScheduledBatch({seq.id: seq}, [40], 40)
            batch.want_drafts({seq.id: K})
            batch.feeds_draft_model = True
            outputs += [
                [*out.token_ids.values(), *(out.draft_token_ids or {}).values()] for out in ranks.outputs(batch)
            ]
        one.close()
        two.close()
        assert len(outputs[0][1]) == K
        assert outputs == outputs[:1] * 5


def test_block_bytes_include_draft_layers(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    head = make_eagle3_head(tmp_path / "head", target, num_key_value_heads=1, head_dim=20)
    plain = Config(model=str(target), dtype="float32")
    drafting = replace(plain, speculative_config=SpeculativeConfig(K, EAGLE3, str(head), adaptive=False))
    few, more = (ModelRunner(each, ModelConfig.from_folder(target)).kv_block_bytes for each in (plain, drafting))
    assert more == few + 2 * 20 * 16 * 4


REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "vocabulary": ({"vocab_size": 500}, "vocab_size is 500, but the model has 384; give a head that was made for it"),
    "width": ({"target_hidden_size": 48}, "target_hidden_size is 48, but the model has 64"),
    "layers": (
        {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]},
        r"eagle_aux_hidden_state_layer_ids \[0, 1, 9\] do not fit a target of 3 layers",
    ),
    "tensors": ({"intermediate_size": 99}, r"midlayer.mlp.down_proj.weight is \[64, 72\], expected \[64, 99\]"),
    "architecture": ({"architectures": ["Qwen3ForCausalLM"]}, "architecture not supported: Qwen3ForCausalLM"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_head_of_other_model_is_refused(name: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    head = make_eagle3_head(tmp_path / "head", target)
    entries, message = REFUSED[name]
    file = head / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
    _refused(
        target, SpeculativeConfig(K, EAGLE3, str(head), adaptive=False), f"speculative_config.model {head}: .*{message}"
    )


@pytest.mark.parametrize("method", [EAGLE3, DRAFT_MODEL])
def test_draft_model_with_missing_tensor_is_refused(method: str, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    head = method == EAGLE3
    folder = make_eagle3_head(tmp_path / "own", target) if head else make_checkpoint(tmp_path / "own", seed=2)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(weights) if name.endswith("mlp.down_proj.weight"))
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    message = f"speculative_config.model {folder}: .*{name}"
    _refused(target, SpeculativeConfig(K, method, str(folder), adaptive=False), message)


def test_missing_draft_head_is_refused(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target")
    _refused(target, SpeculativeConfig(K, EAGLE3, "/nowhere"), "speculative_config.model /nowhere: .*does not exist")


def test_checkpoint_without_mtp_layers_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=1, num_nextn_predict_layers=0)
    _refused(folder, SpeculativeConfig(K, MTP, adaptive=False), "the checkpoint has no layer that drafts")


def test_lockstep_engines_refuse_mtp(tmp_path: Path) -> None:
    folder = make_mtp_checkpoint(tmp_path, "glm4_moe", num_hidden_layers=1)
    parts = {"parallel_config": ParallelConfig(2), "enable_expert_parallel": True}
    _refused(folder, SpeculativeConfig(K, MTP, adaptive=False), "leave out --dp-size, or speculation", **parts)


def _refused(folder: Path, spec: SpeculativeConfig, message: str, **given: Any) -> None:
    config = Config(model=str(folder), speculative_config=spec, **given)
    with pytest.raises(ModelError, match=message) as refused:
        ModelRunner(config, ModelConfig.from_folder(folder))
    assert "\n" not in str(refused.value)
