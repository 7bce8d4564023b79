"""Random workloads with drafts of every method for every architecture, beside plain decoding:

    python -m tests.parity.random_drafts [--seed 7] [--cases 20] [--seconds 180] [--kernels cpu] [--cpu-isa avx2]

Each case is a model, a draft model or a lookup, dtypes, ranks and most drafts of a step, with workloads and settings as
in test_drafts_on_ranks.py: sampled and greedy requests, preempted, in chunks, from the prefix cache, launched ahead,
and moved in the middle of drafts. A case that differs ends it and is named; in the end it prints what it has seen as
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from common.params.config_parts import DRAFT_MODEL, MTP
from kernels.cpu.backend import CpuBackend
from kernels.select import CPU, CPU_BACKENDS
from tests.checkpoints import ARCHITECTURES
from tests.parity.test_drafts_on_ranks import FORMS, METHODS, compare

# Whose checkpoints have layers that draft.
WITH_LAYERS: Final = ("glm4_moe", "deepseek_v3", "deepseek_v32")
ALL_FORMS: Final[dict[str, dict[str, Any]]] = {**FORMS, "bfloat16": {"dtype": "bfloat16"}}
# Most drafts of a step and sequence; workloads of a case.
MOST_DRAFTS, NUM_WORKLOADS = 8, 12


def check_case(rnd: random.Random, kernels: str, end: float) -> Counter[str]:
    """Compares one case until `end`."""
    method, architecture = rnd.choice(list(METHODS)), rnd.choice(list(ARCHITECTURES))
    if method == MTP:
        architecture = rnd.choice(WITH_LAYERS)
    if (method, architecture) == (DRAFT_MODEL, "qwen2"):
        # The class of its tokenizer adds a token, for which these small vocabularies have no room.
        architecture = "qwen3"
    form = rnd.choice([name for name in ALL_FORMS if kernels == CPU or name != "int8"])
    size, most, seed = rnd.choice([1, 1, 1, 2]), rnd.randint(1, MOST_DRAFTS), rnd.randrange(2**32)
    case = {"method": method, "architecture": architecture, "form": form, "ranks": size, "drafts": most, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        path, spec = METHODS[method](Path(folder), architecture, most)
        spec = replace(spec, adaptive=rnd.random() < 0.2)
        try:
            seen = compare((path, spec), {"kernels": kernels, **ALL_FORMS[form]}, size, _numbers(seed, size, end))
        except Exception as error:
            error.add_note(json.dumps(case))
            raise
    seen.update(dict.fromkeys((method, architecture, form, f"{size} ranks"), seen["workloads"]))
    return seen


def _numbers(seed: int, size: int, end: float) -> Iterator[int]:
    """Numbers of workloads, as long as there is time; ranks take several times as long."""
    for i in range(NUM_WORKLOADS // size):
        if time.monotonic() < end or not i:
            yield seed + i


def main() -> None:
    """Compares `--cases` cases, or fewer if the time ends first."""
    parser = argparse.ArgumentParser(description="Compares random workloads with drafts with plain decoding.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no workload after so long")
    parser.add_argument("--kernels", choices=CPU_BACKENDS, default=CPU)
    parser.add_argument("--cpu-isa", help="also one of the library's for tests, such as amx_emulated")
    options = parser.parse_args()
    held: list[CpuBackend] = []
    if options.cpu_isa:
        # While this back end lives, all engines of this process use its instruction set.
        held.append(CpuBackend(options.cpu_isa))
    rnd = random.Random(options.seed)
    end, seen = time.monotonic() + options.seconds, Counter[str]()
    for _ in range(options.cases):
        if time.monotonic() < end:
            seen += check_case(rnd, options.kernels, end)
    print(json.dumps({"seed": options.seed, "kernels": options.kernels, "cpu_isa": options.cpu_isa, **seen}))


if __name__ == "__main__":
    main()
