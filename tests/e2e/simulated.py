"""A fleet of simulated workers for tests: a model folder without weights, requests, and how their streams end."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import grpc
from fissile.v1 import inference_pb2 as pb
from fissile.v1.inference_pb2_grpc import InferenceServiceStub

from tests.e2e.service import Service
from tests.unit.router.support import EOS, save, tokenizer_files

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "eos_token_id": EOS,
    "bos_token_id": None,
    "torch_dtype": "float32",
}
OPTIONS = ["--simulate", "fixed:5ms"]


def simulated_model(folder: Path, max_model_len: int = 2048) -> Path:
    """Writes what a simulated worker needs of a checkpoint."""
    config = {**CONFIG, "max_position_embeddings": max_model_len}
    return save({**tokenizer_files(), "config.json": json.dumps(config).encode()}, folder)


def wait_workers(service: Service, count: int, within_s: float = 200.0, model: str = "") -> None:
    end = time.monotonic() + within_s
    while service.stub.GetModel(pb.GetModelRequest(model=model), timeout=60).model.ready_workers != count:
        assert time.monotonic() < end, f"not {count} workers"
        time.sleep(0.02)


def request(i: int, max_tokens: int = 24) -> pb.GenerateRequest:
    ids = [random.Random(i).randrange(256) for _ in range(1 + i * 7 % 90)]
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), request_id=f"r{i}")
    made.sampling_params.max_tokens = max_tokens
    made.sampling_params.ignore_eos = True
    made.output_options.return_token_ids = True
    return made


def outcome(stub: InferenceServiceStub, i: int, max_tokens: int) -> tuple[grpc.StatusCode, int]:
    """Status of one stream, and how many tokens came."""
    tokens = 0
    call = stub.Generate(request(i, max_tokens), timeout=60)
    try:
        for part in call:
            tokens += len(part.token_ids)
    except grpc.RpcError:
        pass
    code = call.code()
    assert isinstance(code, grpc.StatusCode)
    return code, tokens
