"""Policies on a workload of shared prefixes, in virtual time: `python -m tests.bench.router.prefix [--routers 4]`.

Prints, per policy, the share of prompt tokens that the prefix caches saved, the time to the first token, and how evenly
the requests were spread. Nothing depends on how busy this machine is.
"""

from __future__ import annotations

import argparse

from router.scheduling.placement import PLACEMENTS
from tests.bench.router.fleet import FleetRun, Workload, spread
from worker.simulation.presets import cost_model


def main() -> None:
    """Runs every policy on the same requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--routers", type=int, default=1, help="that share nothing but the workers")
    parser.add_argument("--preset", default="mi300x-llama-8b")
    parser.add_argument("--blocks", type=int, default=2560, help="KV blocks of 16 tokens per worker")
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--prefixes", type=int, default=48)
    parser.add_argument("--skew", type=float, default=0.0, help="Zipf exponent of the prefixes' popularity")
    args = parser.parse_args()
    workload = Workload(requests=args.requests, rate=args.rate, prefixes=args.prefixes, skew=args.skew)
    print("| policy | saved | TTFT p50 | p99 | fewest, most requests on a worker |\n| --- | --- | --- | --- | --- |")
    for policy in PLACEMENTS:
        run = FleetRun(
            policy, [cost_model(args.preset)] * args.workers, num_blocks=args.blocks, num_routers=args.routers
        )
        result = run.run(workload)
        fewest, most = spread(result.outcomes)
        times = " | ".join(f"{1000 * result.ttft_s(q):.0f} ms" for q in (0.5, 0.99))
        print(f"| {policy} | {100 * result.saved:.1f} % | {times} | {fewest}, {most} |")


if __name__ == "__main__":
    main()
