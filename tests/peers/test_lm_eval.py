"""The real lm-evaluation-harness: by `local-completions` over a facade, and by the example over gRPC."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from fissile.v1 import inference_pb2 as pb

from common.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.clients import PINNED
from tests.e2e.facade_process import running_facade
from tests.e2e.service import REPOSITORY, Process, Service, running_service
from tests.peers.environment import peer_environment, peer_variables

pytestmark = pytest.mark.long

DEMO = REPOSITORY / "deploy" / "demo" / "checkpoint"
# `local-completions` counts tokens with transformers; the example calls the router by gRPC.
PACKAGES = (PINNED["lm-eval"], "transformers==5.24.0", "grpcio==1.85.3", "protobuf==7.36.2")
LIMIT_S = 300.0
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"context": "Once upon a time", "choices": [" there was a fox", " zebra", "!"], "label": 0},
    {"context": "12 + 7 =", "choices": [" 19", " 20"], "label": 0},
    {"context": "é 😀", "choices": [" the", " é"], "label": 1},
    # Longer than the model's length: lm-eval cuts its beginning.
    {"context": ("The cat sat. " * 80).strip(), "choices": [" The", " A dog"], "label": 0},
)
SHORT = QUESTIONS[:3]
# Longer than the model's length, which lm-eval cuts into windows.
TEXT = "Once upon a time there was a fox. It ran to the cat and sat on the mat. " * 30
LENGTH: Final = 256
# Task -> its fields beside those of its data.
TASKS: dict[str, dict[str, Any]] = {
    "cloze": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "story": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    options = ["--max-model-len", str(LENGTH), "--dtype", "float32"]
    with running_service(tmp_path_factory.mktemp("fissile"), DEMO, worker_options=options) as service:
        yield service


@pytest.fixture(scope="module")
def facade(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with running_facade([service.router.address], tmp_path_factory.mktemp("facade")) as facade:
        yield facade


def run(program: str, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program of lm-eval's environment, and fails with its messages."""
    command: list[str | Path] = [peer_environment("lm-eval", PACKAGES) / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **more)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def evaluate(facade: Process, folder: Path, *options: str) -> dict[str, list[Any]]:
    """Samples of each task by `local-completions`."""
    tasks = folder / "tasks"
    tasks.mkdir()
    data = {"cloze": QUESTIONS, "rolling": [{"text": TEXT}], "story": SHORT}
    for name, fields in TASKS.items():
        file = tasks / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in data[name]))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        # JSON is YAML.
        (tasks / f"{name}.yaml").write_text(json.dumps({"task": f"fissile_{name}", **source, **fields}))
    url = f"http://{facade.address}/v1/completions"
    model = f"model=test,base_url={url},tokenizer_backend=huggingface,tokenizer={DEMO},max_length={LENGTH}"
    names = ",".join(f"fissile_{name}" for name in TASKS)
    run(
        *("lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks", names, *options),
        *("--include_path", str(tasks), "--output_path", str(folder / "out"), "--log_samples"),
        env={**peer_variables(), "HF_HOME": str(folder / "cache")},
    )
    found: dict[str, list[Any]] = {}
    for name in TASKS:
        (file,) = (folder / "out").rglob(f"samples_fissile_{name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = sorted(samples, key=lambda each: each["doc_id"])
    return found


def own_score(service: Service, context: Sequence[int], continuation: Sequence[int]) -> pb.Score:
    request = pb.ScoreRequest(context=pb.TextOrTokens(token_ids=pb.TokenIds(ids=context)))
    request.continuations.add(token_ids=pb.TokenIds(ids=continuation))
    return service.stub.Score(request, timeout=60).scores[0]


@pytest.mark.parametrize("options", [(), ("--batch_size", "4")])
@pytest.mark.client("lm-eval", "`local-completions`: log-likelihoods, rolling ones and answers, one and four a request")
def test_local_completions_gives_the_figures_of_score(
    service: Service, facade: Process, tmp_path: Path, options: tuple[str, ...]
) -> None:
    found = evaluate(facade, tmp_path, *options)
    tokenizer = Tokenizer.from_folder(DEMO)
    assert [len(found[name]) for name in TASKS] == [len(QUESTIONS), 1, len(SHORT)]
    for question, sample in zip(QUESTIONS, found["cloze"], strict=True):
        ids = tokenizer.encode(str(question["context"]))
        for choice, [[logprob, is_greedy]] in zip(question["choices"], sample["resps"], strict=True):
            whole = tokenizer.encode(f"{question['context']}{choice}")
            # One token is generated behind them.
            cut = max(0, len(whole) - (LENGTH - 1))
            expected = own_score(service, whole[cut : len(ids)], whole[len(ids) :])
            assert float(logprob) == pytest.approx(expected.logprob, rel=1e-5, abs=1e-5)
            assert (str(is_greedy) == "True") is expected.greedy
    [[[rolling]]] = [sample["resps"] for sample in found["rolling"]]
    assert -1e5 < float(rolling[0] if isinstance(rolling, list) else rolling) < -100
    for question, sample in zip(SHORT, found["story"], strict=True):
        asked = pb.GenerateRequest(text=str(question["context"]))
        asked.sampling_params.max_tokens, asked.sampling_params.temperature = 24, 0.0
        asked.sampling_params.stop_strings.append(".")
        assert sample["resps"] == [[service.stub.GenerateOnce(asked, timeout=60).answers[0].text]]


# Prints the answers of the example's model to the lists of arguments that it reads.
DRIVER: Final = """
import json, sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from lm_eval_model import FissileLM
model = FissileLM(address=sys.argv[2])
asked = {name: [SimpleNamespace(args=tuple(args)) for args in each] for name, each in json.load(sys.stdin).items()}
print(json.dumps({name: getattr(model, name)(each) for name, each in asked.items()}))
"""
PAIRS = [
    ("the cat", " sat on the mat"),
    ("the cat", " ran"),
    ("the dog ", "sat"),
    ("", "the cat sat"),
    ("x" * 400, " y"),
]


def logprobs(reference: Any, ids: list[int], start: int, num_ids: int) -> tuple[float, bool]:
    """Sum over the tokens from `start` on, and whether each is the most likely one."""
    with torch.inference_mode():
        every = reference(torch.tensor([ids])).logits[0, :, :num_ids].double().log_softmax(-1)
    rows = every[start - 1 : -1]
    own = rows.gather(1, torch.tensor(ids[start:]).unsqueeze(1)).squeeze(1)
    return own.sum().item(), bool((own == rows.max(1).values).all())


@pytest.mark.client("lm-eval", "examples/lm_eval_model.py over gRPC: log-likelihoods, rolling ones and answers")
def test_example_gives_the_figures_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    folder = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_token_id is not None
    reference = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_ids = min(tokenizer.vocab_size, reference.config.vocab_size)
    options = ["--max-model-len", "128", "--dtype", "float32", "--prefix-caching"]
    text, short = "the cat sat on the mat and the dog ran to the cat again " * 4, "the cat sat"
    until = {"until": ["\n"], "max_gen_toks": 5}
    asked = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [[text], [text], [text], [short]],
        "generate_until": [["the cat", until]] * 2,
    }
    with running_service(tmp_path, folder, worker_options=options) as service:
        model = service.stub.GetModel(pb.GetModelRequest(), timeout=60).model
        done = run(
            *("python", "-c", DRIVER, str(REPOSITORY / "examples"), service.router.address),
            input=json.dumps(asked),
            env={**peer_variables(), "PYTHONPATH": str(REPOSITORY / "protos")},
        )
    found = json.loads(done.stdout)
    for (context, continuation), (total, is_greedy) in zip(PAIRS, found["loglikelihood"], strict=True):
        ids = tokenizer.encode(context + continuation)
        start = len(tokenizer.encode(context.rstrip())) if context else 0
        if not start:
            ids, start = [tokenizer.bos_token_id, *ids], 1
        cut = max(0, len(ids) - 127)
        expected = logprobs(reference, ids[cut:], start - cut, num_ids)
        assert (total, is_greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
    *rolling, one = found["loglikelihood_rolling"]
    assert rolling[0] < 0
    assert rolling == [rolling[0]] * 3
    ids = [next(iter(model.eos_token_ids), tokenizer.bos_token_id), *tokenizer.encode(short)]
    assert one == pytest.approx(logprobs(reference, ids, 1, num_ids)[0], abs=1e-3)
    answers = found["generate_until"]
    assert len(answers) == 2
    assert answers[0] == answers[1]
