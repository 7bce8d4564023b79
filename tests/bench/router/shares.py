"""What tenants get of a router that is too busy: `python -m tests.bench.router.shares`.

Pure, on a virtual clock. First one worker that takes 50 requests a second: B asks for 5 a second, beside A, which asks
for more and more and does not wait when it is refused. Then two tenants that both always wait for one of the worker's
places: prompts of 20 tokens with answers of 2000, and the other way round.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from common.delay_gate import DelayGate
from common.errors import QueueFullError
from common.limits import CHARGE_OUTPUT_S, OUTPUT_TOKEN_COST
from router.scheduling.admission import AdmissionQueue
from router.scheduling.fair_queue import FairQueue, TenantShares
from router.scheduling.placement import PLACEMENTS
from router.scheduling.queued_request import QueuedRequest
from router.scheduling.worker_load import LoadReport
from tests.bench.router.bed import parser, show
from tests.unit.router.scheduling.dispatching import make_dispatcher

SERVICE_S = 1 / 50
B_ASKS_S = 1 / 5
STEP_S = 0.01


@dataclass
class Flood:
    """What became of the requests of A and B, and B's waits in seconds."""

    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)


def flood(a_per_s: float, *, capacity: int = 100, seconds: float = 30.0) -> Flood:
    """A worker that begins with a request every SERVICE_S, and two tenants; counted from when the queue can be full."""
    seen = Flood()
    dispatcher = make_dispatcher(DelayGate(0.0), PLACEMENTS["least_loaded"](), capacity)
    dispatcher.lane_up("w", "m", LoadReport(0.0, decoding_seqs=1), 0.0)
    warm_s = capacity / max(a_per_s - 1 / SERVICE_S, 1.0) + 1.0
    due = {"A": 0.0, "B": 0.0, "service": 0.0}
    every = {"A": 1 / a_per_s, "B": B_ASKS_S, "service": SERVICE_S}
    key = serial = 0
    while (now := min(due.values())) < warm_s + seconds:
        who = min(due, key=lambda name: due[name])
        due[who] += every[who]
        counts = now >= warm_s
        if who == "service":
            room = LoadReport(now, decoding_seqs=1, room_tokens=10, room_seqs=1, submit_seen=serial)
            dispatcher.report("w", room)
            for release in dispatcher.decide(now):
                serial = release.serial
                for request in release.requests:
                    seen.served[request.tenant] += counts
                    if request.tenant == "B" and counts:
                        seen.waits.append(now - request.arrival)
            continue
        key += 1
        try:
            dropped = dispatcher.arrive(QueuedRequest(key, "m", 10, now, tenant=who), now)
        except QueueFullError:
            seen.refused[who] += counts
            continue
        if dropped is not None:
            seen.dropped[dropped.request.tenant] += counts
    return seen


@dataclass
class _Held:
    request: QueuedRequest
    since: int
    output: int


def shared_places(
    kinds: dict[str, tuple[int, int]], *, places: int = 64, steps: int = 20_000
) -> dict[str, Counter[str]]:
    """Tenants that always wait for one of `places`, each of which makes a token in a step.

    Args:
        kinds: by tenant, tokens of its prompts and of its answers.
        places: requests that run at a time.
        steps: how long, of STEP_S each; the first half is not counted.

    Returns:
        By tenant: requests that were served, prompt and output tokens, and `work`, with output at its cost.
    """
    shares = TenantShares()
    queue, lane = AdmissionQueue(1000, shares), FairQueue(shares)
    had: dict[str, Counter[str]] = defaultdict(Counter)
    running: dict[int, _Held] = {}
    ends: dict[int, list[int]] = defaultdict(list)
    every = round(CHARGE_OUTPUT_S / STEP_S)
    key = 0

    def wait(tenant: str) -> None:
        nonlocal key
        key += 1
        new = QueuedRequest(key, "m", kinds[tenant][0], float(key), tenant=tenant)
        queue.push(new)
        lane.push(new)

    for _ in range(10):
        deque(map(wait, kinds), maxlen=0)
    for step in range(steps):
        counts = step >= steps // 2
        for ended in ends.pop(step, ()):
            held = running.pop(ended)
            shares.charge_output(held.request, held.output)
        while len(running) < places:
            served = lane.pop(0.0)
            queue.remove(served.key)
            prompt, output = kinds[served.tenant]
            running[served.key] = _Held(served, step, output)
            ends[step + output].append(served.key)
            had[served.tenant].update(requests=counts, prompt=prompt * counts)
            wait(served.tenant)
        if step % every == 0:
            for held in running.values():
                shares.charge_output(held.request, step - held.since)
        for held in running.values() if counts else ():
            had[held.request.tenant]["output"] += 1
    for counted in had.values():
        counted["work"] = round(counted["prompt"] + OUTPUT_TOKEN_COST * counted["output"])
    return had


def main() -> None:
    args = parser(__doc__).parse_args()
    rows = []
    for a_per_s in (60, 200, 1000, 5000):
        seen = flood(a_per_s)
        rows.append(
            {
                "A asks/s": a_per_s,
                "A served/s": seen.served["A"] / 30,
                "B served/s": seen.served["B"] / 30,
                "B refused": seen.refused["B"],
                "B longest wait ms": 1000 * max(seen.waits),
                "A refused/s": seen.refused["A"] / 30,
                "A dropped/s": seen.dropped["A"] / 30,
            }
        )
    show(rows, as_json=args.json)
    kinds = {"20 in, 2000 out": (20, 2000), "2000 in, 20 out": (2000, 20)}
    had = shared_places(kinds, places=1000, steps=20_000)
    show([{"tenant": name, **had[name]} for name in kinds], as_json=args.json)


if __name__ == "__main__":
    main()
