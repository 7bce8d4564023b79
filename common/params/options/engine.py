"""Options of the engine: of workers, of `fissile serve` for its workers, and of commands that run the engine alone."""

from __future__ import annotations

from typing import Final

import click

from common.limits import STEP_TIMEOUT_S
from common.params.config_parts import QUANTIZE, SCHEDULING_POLICIES
from common.params.options.option import FILE, Option
from common.params.options.types import SHORTEST_S, ByteSize, Duration, Fraction, NodeCount, Sizes, Speculation
from common.params.step_defaults import BUDGET_ON_CPU, BUDGET_ON_GPU, POLICY_ON_CPU, POLICY_ON_GPU, PREFILL_SLICE_S

SERVE: Final = "serve"
WORKER: Final = "worker"
OFFLINE: Final = "bench offline"
WARMUP: Final = "worker warmup"
REPLAY: Final = "replay-step"
# Commands that run the engine, and those of them that schedule more than warm-up steps.
ENGINE_COMMANDS: Final = (WORKER, OFFLINE, WARMUP)
_STEPS: Final = (WORKER, OFFLINE)
# Commands that load a model.
MODEL_COMMANDS: Final = (*ENGINE_COMMANDS, REPLAY)
_COUNT: Final = click.IntRange(min=1)

_MODEL: Final = (
    Option(
        "--dtype", "FISSILE_DTYPE",
        "Dtype of weights and activations: auto, float32, bfloat16 or float16. auto is the checkpoint's, or float32 if "
        "this CPU has no fast kernels for that.",
        (SERVE, *MODEL_COMMANDS), default="auto", is_passed_on=True, field="dtype",
    ),
    Option(
        "--kv-cache-dtype", "FISSILE_KV_CACHE_DTYPE",
        "Dtype of the KV cache: auto (the model's), bfloat16, float16 or fp8. Smaller dtypes keep more tokens in the "
        "same memory and make answers less exact.",
        (SERVE, *MODEL_COMMANDS), default="auto", is_passed_on=True, field="kv_cache_dtype",
    ),
    Option(
        "--kernels", "FISSILE_KERNELS",
        "Kernel back end: cpu (native CPU kernels), triton or aiter (GPUs), torch (PyTorch's operations), or auto: the "
        "first that this machine can run.",
        (SERVE, *MODEL_COMMANDS), default="auto", is_passed_on=True, field="kernels",
    ),
    Option(
        "--batch-invariant/--no-batch-invariant", "FISSILE_BATCH_INVARIANT",
        "On a GPU: keep answers independent of what else runs. Without it kernels may be faster, and equal requests "
        "may get different answers.",
        ENGINE_COMMANDS, default=True, field="batch_invariant",
    ),
    Option(
        "--enforce-eager", "FISSILE_ENFORCE_EAGER",
        "On a GPU: capture no decode steps as graphs. Starts sooner, takes less memory, decodes more slowly.",
        ENGINE_COMMANDS, default=False, is_flag=True, field="enforce_eager",
    ),
    Option(
        "--graph-sizes", "FISSILE_GRAPH_SIZES",
        "On a GPU: batch sizes whose decode step is captured as a graph. Default: 1, 2, 4, 8, 16, 24, ... up to "
        "--max-num-seqs.",
        ENGINE_COMMANDS, Sizes(), (), metavar="N,N,...",
    ),
    Option(
        "--weights-cache", "FISSILE_WEIGHTS_CACHE",
        "Folder of packed weights, which later starts and other workers of this machine map; off keeps none. Default: "
        "fissile/weights in $XDG_CACHE_HOME or ~/.cache.",
        (SERVE, *_STEPS), metavar="DIR|off", is_passed_on=True, field="weights_cache", library_default="",
    ),
    Option(
        "--cpu-isa", "FISSILE_CPU_ISA",
        "Instruction set of the native kernels: auto (the best here), amx, avx512bf16, avx512, avx2 or plain. Under "
        "--failover exact, requests move only between workers with the same one.",
        (SERVE, *MODEL_COMMANDS), default="auto", is_passed_on=True, field="cpu_isa",
    ),
    Option(
        "--quantize", "FISSILE_QUANTIZE",
        "Quantize the weights when they are loaded. int8 (on GPUs fp8 too): weights only, at half the memory of "
        "bfloat16. int4: under a third. w8a8_int8, w8a8_fp8 (GPUs): activations in 8 bits too. no: as in checkpoints. "
        "Answers change. Under --failover exact, requests move only between workers with the same setting.",
        (SERVE, *MODEL_COMMANDS), click.Choice(QUANTIZE), QUANTIZE[0], is_passed_on=True, field="quantize",
    ),
    Option(
        "--speculative-config", "FISSILE_SPECULATIVE_CONFIG",
        "Verify draft tokens, so that a step gives several; no answer changes. A JSON object with method (ngram: the "
        "tokens that followed the newest tokens before; mtp: a layer of the checkpoint; eagle3: the head in the folder "
        "model; draft_model: the model in it), num_speculative_tokens (most per step), for ngram prompt_lookup_max and "
        "prompt_lookup_min (how many tokens are looked up), and adaptive: false, which verifies all drafts even where "
        "that is slower. Default: none.",
        (SERVE, *ENGINE_COMMANDS), Speculation(), metavar="JSON", is_passed_on=True, field="speculative_config",
    ),
    Option(
        "--speculate", "FISSILE_SPECULATE",
        "Use the EAGLE-3 head of the demo model for drafts: a --speculative-config to try out.",
        (SERVE,), default=False, is_flag=True,
    ),
)  # fmt: skip

_SCHEDULING: Final = (
    Option(
        "--max-model-len", "FISSILE_MAX_MODEL_LEN",
        "Longest prompt plus answer, in tokens. Default: the model's, or as much as the KV cache holds.",
        (SERVE, *MODEL_COMMANDS), click.IntRange(min=2), is_passed_on=True, field="max_model_len", library_default=0,
    ),
    Option(
        "--max-num-seqs", "FISSILE_MAX_NUM_SEQS", "Most sequences that run at once.",
        (SERVE, *ENGINE_COMMANDS), _COUNT, 512, is_passed_on=True, field="max_num_seqs",
    ),
    Option(
        "--max-num-batched-tokens", "FISSILE_MAX_NUM_BATCHED_TOKENS",
        "Token budget of a step; longer prompts are computed in pieces. Default: "
        f"{BUDGET_ON_CPU} plus --max-num-seqs on a CPU, {BUDGET_ON_GPU} on a GPU and with --simulate.",
        (SERVE, *ENGINE_COMMANDS), _COUNT, field="max_num_batched_tokens", library_default=16384,
    ),
    Option(
        "--kv-cache-memory", "FISSILE_KV_CACHE_MEMORY",
        "KV cache memory of each rank, e.g. 2GiB. Default: a quarter of the free memory, for all ranks together.",
        (SERVE, *MODEL_COMMANDS), ByteSize(), is_passed_on=True, field="kv_cache_memory", library_default=0,
    ),
    Option(
        "--gpu-memory-utilization", "FISSILE_GPU_MEMORY_UTILIZATION",
        "On a GPU and with --simulate: part of the memory for weights, a step, the KV cache and other processes "
        "together.",
        ENGINE_COMMANDS, Fraction(), 0.9, metavar="FRACTION", field="gpu_memory_utilization",
    ),
    Option(
        "--block-size", "FISSILE_BLOCK_SIZE", "Tokens per KV block; 1 or a multiple of 16.",
        MODEL_COMMANDS, click.INT, 16, field="kv_cache_block_size",
    ),
    Option(
        "--scheduling-policy", "FISSILE_SCHEDULING_POLICY",
        "Scheduling policy of steps. prefill_first: prompts go before running answers; mixed: both share each step. "
        f"Default: {POLICY_ON_CPU} on a CPU, {POLICY_ON_GPU} on a GPU and with --simulate.",
        (SERVE, *_STEPS), click.Choice(SCHEDULING_POLICIES), is_passed_on=True,
        field="scheduling_policy", library_default=SCHEDULING_POLICIES[0],
    ),
    Option(
        "--prefill-slice", "FISSILE_PREFILL_SLICE",
        "Longest step with prompts while any sequence decodes, or the time of five usual decode steps if that is "
        "longer. It bounds the gaps of streams beside a long prompt. 0s bounds steps by tokens alone.",
        ENGINE_COMMANDS, Duration(), PREFILL_SLICE_S, "prefill_slice_s", field="prefill_slice_s", library_default=0.0,
    ),
    Option(
        "--prefix-caching/--no-prefix-caching", "FISSILE_PREFIX_CACHING", "Reuse the KV blocks of equal prefixes.",
        (SERVE, *_STEPS), default=True, field="enable_prefix_caching", library_default=False,
    ),
    Option(
        "--delay-factor --scheduler-delay-factor", "FISSILE_SCHEDULER_DELAY_FACTOR",
        "Hold prompts that come without a router back for this many prefill durations, so that more of them share a "
        "prefill; 0 is off. Routers have a --delay-factor of their own.",
        _STEPS, click.FloatRange(min=0), 0.0, "scheduler_delay_factor", field="scheduler_delay_factor",
    ),
    Option(
        "--hash-seed", "FISSILE_HASH_SEED", "Seed of the block hashes, the same for the whole fleet.",
        (WORKER,), click.IntRange(0, 2**64 - 1), 0, field="hash_seed",
    ),
    Option(
        "--kv-digests", "FISSILE_KV_DIGESTS",
        "Part of the cached KV blocks whose contents are digested, so that routers find workers that differ. All "
        "workers choose the same ones. 0% is off.",
        (WORKER,), Fraction(), 0.0625, metavar="FRACTION", field="kv_digests", library_default=0.0,
    ),
    Option(
        "--kv-tiers", "FISSILE_KV_TIERS",
        "Where cached KV blocks go besides the KV cache, so that prompts find more of their beginnings there: "
        "memory:SIZE, files:FOLDER:SIZE, mooncake://MASTER:PORT?segment=SIZE and redis://HOST:PORT/DATABASE, with "
        "commas between. A block that is damaged, missing or late is computed. Whoever can write to a tier can change "
        "answers. Default: nowhere.",
        (SERVE, WORKER, OFFLINE), default="", metavar="TIER,TIER,...", is_passed_on=True, field="kv_tiers",
    ),
    Option(
        "--constraints/--no-constraints", "FISSILE_CONSTRAINTS",
        "Serve answers that must match a schema, a regular expression or a grammar. This takes up to 100 MB on each "
        "rank, for the vocabulary.",
        (WORKER,), default=True, parameter="enable_constraints", field="enable_constraints",
    ),
)  # fmt: skip

_RANKS: Final = (
    Option(
        "--threads", "FISSILE_THREADS",
        "Compute threads of a worker, shared among its ranks on this machine. Default: all cores; with serve, an equal "
        "share of them.",
        (SERVE, *MODEL_COMMANDS), _COUNT,
    ),
    Option(
        "--tp-size", "FISSILE_TP_SIZE",
        "Tensor parallelism: number of ranks of a worker, each a process with its slice of the weights. It must divide "
        "attention heads and feed-forward units, and divide the key/value heads or be a multiple of them.",
        (SERVE, *ENGINE_COMMANDS), _COUNT, 1, field="tensor_parallel_size",
    ),
    Option(
        "--enable-expert-parallel/--no-enable-expert-parallel", "FISSILE_ENABLE_EXPERT_PARALLEL",
        "Expert parallelism: each rank holds some experts whole, instead of a part of each.",
        (SERVE, *ENGINE_COMMANDS), default=False, field="enable_expert_parallel",
    ),
    Option(
        "--dp-size", "FISSILE_DP_SIZE",
        "Data parallelism in lockstep, for mixtures of experts with --enable-expert-parallel: this many workers, each "
        "with its own requests and cache, share the experts. Start them with the same options but --port and --dp-rank "
        "0, 1, ...; all of them serve, or none. Without --enable-expert-parallel run independent workers instead.",
        (WORKER,), _COUNT, 1,
    ),
    Option(
        "--dp-rank", "FISSILE_DP_RANK", "Number of this worker among those of --dp-size, from 0.",
        (WORKER,), click.IntRange(min=0), 0,
    ),
    Option(
        "--nnodes", "FISSILE_NNODES",
        "Number of machines that the ranks are spread over, equally many on each. Run this command on all of them with "
        "the same --tp-size, --nnodes, --dist-init and --model, and with --node-rank 0, 1, ...: machine 0 serves "
        "requests. The others run ranks only, and also accept --dist-secret, --threads, --drain-timeout, --log-level, "
        "and --health-port with --host. auto takes all three from LeaderWorkerSet, torchrun or Slurm; port 4100 of "
        "machine 0.",
        (WORKER,), NodeCount(), 1, metavar="N|auto",
    ),
    Option(
        "--node-rank", "FISSILE_NODE_RANK", "Number of this machine, from 0.", (WORKER,), click.IntRange(min=0), 0,
    ),
    Option(
        "--dist-init", "FISSILE_DIST_INIT",
        "With --nnodes or --dp-size: an address of machine 0, or of worker 0, where it waits for the others' ranks. "
        "Until all are connected each rank has a port of its own too. Nothing is encrypted: use a private network.",
        (WORKER,), default="", metavar="tcp://HOST:PORT",
    ),
    Option(
        "--dist-secret", "FISSILE_DIST_SECRET_FILE",
        "File with the secret that ranks prove to each other, the same everywhere; or set FISSILE_DIST_SECRET to the "
        "secret itself. Default: none, so anyone who reaches a port of the ranks can pose as one.",
        (WORKER,), FILE, metavar="FILE",
    ),
    Option(
        "--step-timeout", "FISSILE_STEP_TIMEOUT",
        "Time after which a step of several ranks counts as hung: routers move its requests to other workers, and the "
        "ranks are started again. It must be longer than the longest prefill step. With --step-dumps also the time "
        "after which any step is dumped.",
        (SERVE, WORKER), Duration(SHORTEST_S), STEP_TIMEOUT_S, is_passed_on=True,
    ),
    Option(
        "--step-dumps", "FISSILE_STEP_DUMPS",
        "Folder for dumps of the newest steps, made if it is missing: one when the engine fails, and one for each step "
        "longer than --step-timeout. A dump has no texts and no tokens; `fissile replay-step` reads it. Default: none.",
        (SERVE, WORKER), FILE, metavar="FOLDER", is_passed_on=True,
    ),
    Option(
        "--simulate", "FISSILE_SIMULATE",
        "Make up tokens without a model, at the speed of a preset: instant, fixed:5ms, mi300x-llama-8b, ...",
        (SERVE, WORKER), metavar="PRESET",
    ),
    Option(
        "--step", "FISSILE_REPLAY_STEP",
        "Number of the step. Default: the oldest one that had not ended, or else the one that took longest.",
        (REPLAY,), _COUNT, metavar="N",
    ),
    Option(
        "--trace", "FISSILE_REPLAY_TRACE", "File of the trace that is written; compressed if it ends with .gz.",
        (REPLAY,), FILE, "step-trace.json", metavar="FILE",
    ),
)  # fmt: skip

ENGINE: Final = (*_MODEL, *_SCHEDULING, *_RANKS)
"""Rows of this file."""
