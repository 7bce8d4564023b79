"""What simulated workers take of this machine: `python -m tests.bench.simulated_fleet [--workers 8] [--streams 4]`.

Starts a router and the workers, lets them idle, then keeps `--streams` requests per worker in flight, and prints CPU
and memory. Router and client take CPU too: as soon as all of it is taken, workers get less than they ask for.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import resource
import tempfile
import time
from pathlib import Path

from fissile.v1 import inference_pb2 as pb

from tests.e2e.service import Process, Service, generate, running_service
from tests.e2e.simulated import simulated_model, wait_workers

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
MIB = 1 << 20


def cpu_s(process: Process) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{process.running.pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def private_mib(process: Process) -> float:
    """Memory that would be free without the process, MiB."""
    lines = Path(f"/proc/{process.running.pid}/smaps_rollup").read_text("ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / MIB


def request(i: int, prompt: int, output: int) -> pb.GenerateRequest:
    """A request with its own tokens."""
    rnd = random.Random(i)
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[rnd.randrange(256) for _ in range(prompt)]))
    made.sampling_params.max_tokens = output
    made.sampling_params.ignore_eos = True
    return made


def load(service: Service, streams: int, seconds: float, prompt: int, output: int) -> tuple[int, float]:
    """Keeps `streams` requests in flight. Returns how many have ended, and the seconds that it took."""
    start = time.perf_counter()

    def client(index: int) -> int:
        count = 0
        while time.perf_counter() < start + seconds:
            generate(service.stub, request(index * 100_000 + count, prompt, output))
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        ended = sum(pool.map(client, range(streams)))
    return ended, time.perf_counter() - start


def report(service: Service, what: str, seconds: float, before: list[float], processes: list[Process]) -> None:
    """Prints CPU of the last `seconds`, in percent of a core, and memory."""
    used = [100 * (cpu_s(process) - was) / seconds for process, was in zip(processes, before, strict=True)]
    workers = used[1:]
    memory = [private_mib(process) for process in service.workers]
    print(
        f"{what}: CPU of a worker {sum(workers) / len(workers):.1f} % (most {max(workers):.1f} %), "
        f"router {used[0]:.1f} %; memory of a worker {max(memory):.0f} MiB"
    )


def measure(service: Service, args: argparse.Namespace) -> None:
    processes = [service.router, *service.workers]
    before = [cpu_s(process) for process in processes]
    time.sleep(args.seconds)
    report(service, "idle", args.seconds, before, processes)
    before, own = [cpu_s(process) for process in processes], resource.getrusage(resource.RUSAGE_SELF)
    ended, seconds = load(service, args.streams * args.workers, args.seconds, args.prompt, args.output)
    report(service, "loaded", seconds, before, processes)
    client = resource.getrusage(resource.RUSAGE_SELF).ru_utime - own.ru_utime
    rate = ended * (args.prompt + args.output) / seconds / args.workers
    print(
        f"{ended} requests, {ended * args.output / seconds:.0f} output tokens per second in all, {rate:.0f} tokens per "
        f"second and worker with prompts; client {100 * client / seconds:.0f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--preset", default="mi300x-llama-70b-tp8")
    parser.add_argument("--streams", type=int, default=4, help="per worker")
    parser.add_argument("--prompt", type=int, default=500, help="tokens")
    parser.add_argument("--output", type=int, default=200, help="tokens")
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = simulated_model(Path(folder) / "model")
        options = ["--simulate", args.preset]
        print(f"{args.workers} workers at {args.preset}, {args.streams} streams each")
        with running_service(Path(folder), model, workers=args.workers, worker_options=options) as service:
            wait_workers(service, args.workers, within_s=60)
            measure(service, args)


if __name__ == "__main__":
    main()
