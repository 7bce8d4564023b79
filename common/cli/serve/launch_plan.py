"""Plan of `fissile serve`: the options of one router and its workers on this machine, as command lines. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.cli.serve.supervisor import Child

LOOPBACK = "127.0.0.1"
MIB = 1 << 20
# The share of free memory that the KV caches of all workers get together, as with a single worker's own default.
KV_SHARE = 4
# How much longer than its own drain a child may take to end.
DRAIN_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """One router and its workers.

    Attributes:
        model: checkpoint folder, or a name on the Hub before it has been downloaded.
        model_name: name of the model in requests.
        host: address the router listens on; workers always listen on loopback.
        port: port of the router.
        worker_ports: one per worker, distinct.
        max_num_batched_tokens: token budget of a worker's step.
        prefix_caching: whether workers share equal prefixes.
        kv_cache_memory: per rank of a worker, as `--kv-cache-memory` takes it; empty leaves it to the worker.
        drain_timeout_s: how long running requests may take after SIGTERM.
        log_level: of all processes.
        router_options: further options of the router, by name without dashes.
        worker_options: further options of every worker, by name without dashes.
        simulate: preset of workers that run no model; empty runs the model.
        expert_parallel: whether the ranks of a worker hold experts whole.
        health_port: port on which the router says its health in plain text; 0 where its own port does.
        http_port: port of an HTTP facade beside the router; None runs none.
        facade_options: further options of the facade, by name without dashes.
    """

    model: str
    model_name: str
    host: str
    port: int
    worker_ports: Sequence[int]
    max_num_batched_tokens: int
    prefix_caching: bool
    kv_cache_memory: str
    drain_timeout_s: float
    log_level: str
    router_options: Mapping[str, object]
    worker_options: Mapping[str, object]
    simulate: str = ""
    expert_parallel: bool = False
    health_port: int = 0
    http_port: int | None = None
    facade_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def http_url(self) -> str:
        """URL at which clients on this machine reach the facade; "" without one."""
        scheme = "https" if self.facade_options.get("tls_cert") else "http"
        return "" if self.http_port is None else f"{scheme}://{self.near_host}:{self.http_port}"

    @property
    def curl_options(self) -> str:
        """Options that `curl` needs to reach the facade."""
        tls = " --cacert FILE" if self.facade_options.get("tls_cert") else ""
        certificate = " --cert FILE --key FILE" if self.facade_options.get("tls_client_ca") else ""
        return tls + certificate + (" -H 'authorization: Bearer KEY'" if self.router_options.get("api_keys") else "")

    @property
    def address(self) -> str:
        """Address at which clients on this machine reach the router."""
        return f"{self.near_host}:{self.port}"

    @property
    def health_address(self) -> str:
        """Address at which the router serves its health in plain text."""
        return f"{self.near_host}:{self.health_port or self.port}"

    @property
    def client_options(self) -> str:
        """Options that client commands must add to reach the router."""
        tls = " --tls-ca FILE" if self.router_options.get("tls_cert") else ""
        certificate = " --client-cert FILE --client-key FILE" if self.router_options.get("tls_client_ca") else ""
        return tls + certificate + (" --api-key KEY" if self.router_options.get("api_keys") else "")

    @property
    def near_host(self) -> str:
        """Host at which processes on this machine reach the router."""
        return LOOPBACK if self.host in ("0.0.0.0", "::", "[::]") else self.host

    @property
    def worker_addresses(self) -> list[str]:
        """Addresses at which the router reaches the workers."""
        return [f"{LOOPBACK}:{port}" for port in self.worker_ports]

    @property
    def drafting_workers(self) -> list[str]:
        """Addresses of the workers if they speculate; else none."""
        return self.worker_addresses if self.worker_options.get("speculative_config") else []

    def children(self) -> list[Child]:
        """Makes the children in the order of their ends: the facade, and the router while workers finish requests."""
        limit = self.drain_timeout_s + DRAIN_MARGIN_S
        router = Child("router", "router", [*self._router_arguments()], limit)
        workers = [
            Child(f"worker-{i}", "worker", [*self._worker_arguments(i, port)], limit)
            for i, port in enumerate(self.worker_ports)
        ]
        facade = [Child("http", "facade", [*self._facade_arguments()], limit)] if self.http_port is not None else []
        return [*facade, router, *workers]

    def _facade_arguments(self) -> Iterator[str]:
        yield from ("--host", self.host, "--port", str(self.http_port), "--routers", self.address)
        if metrics_port := self.router_options.get("metrics_port"):
            yield from ("--router-metrics", f"{self.near_host}:{metrics_port}")
        yield from self._common_arguments()
        yield from _given(self.facade_options)

    def _router_arguments(self) -> Iterator[str]:
        yield from ("--host", self.host, "--port", str(self.port))
        for address in self.worker_addresses:
            yield from ("--worker", address)
        if self.health_port:
            yield from ("--health-port", str(self.health_port))
        yield from self._common_arguments()
        yield from _given(self.router_options)

    def _worker_arguments(self, index: int, port: int) -> Iterator[str]:
        yield from ("--model", self.model, "--model-name", self.model_name)
        yield from ("--host", LOOPBACK, "--port", str(port), "--worker-id", f"worker-{index}")
        yield from ("--max-num-batched-tokens", str(self.max_num_batched_tokens))
        yield "--prefix-caching" if self.prefix_caching else "--no-prefix-caching"
        if self.kv_cache_memory:
            yield from ("--kv-cache-memory", self.kv_cache_memory)
        if self.simulate:
            yield from ("--simulate", self.simulate)
        if self.expert_parallel:
            yield "--enable-expert-parallel"
        yield from self._common_arguments()
        yield from _given(self.worker_options)

    def _common_arguments(self) -> Iterator[str]:
        yield from ("--drain-timeout", f"{self.drain_timeout_s:g}", "--log-level", self.log_level)

    def describe(self, version: str, kv_memory: str) -> str:
        """Formats the summary that `serve` prints at start."""
        workers = f"{len(self.worker_ports)}: {', '.join(self.worker_addresses)}"
        simulated = f" (simulated: {self.simulate}, no weights)" if self.simulate else ""
        rows = {
            "model": f"{self.model_name} from {self.model}{simulated}",
            "router": f"{self.host}:{self.port}",
            "workers": workers,
            "prefix caching": "on" if self.prefix_caching else "off",
            "token budget": f"{self.max_num_batched_tokens} tokens per step",
            "KV memory": kv_memory,
        }
        if self.http_port is not None:
            rows["http"] = f"{self.host}:{self.http_port}"
        return "\n".join([f"Fissile {version}", *(f"  {name:<15} {value}" for name, value in rows.items())])


def _given(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        elif value is not None:
            yield from (f"--{name.replace('_', '-')}", str(value))


def threads_per_worker(workers: int, cores: int | None = None) -> int | None:
    """Divides the cores among several workers; None leaves all to a single worker."""
    if workers == 1:
        return None
    return max(1, (cores or len(os.sched_getaffinity(0))) // workers)


def kv_memory_per_rank(workers: int, ranks: int, free_bytes: int) -> str:
    """Divides a quarter of the free memory among the ranks of several workers; empty for a single worker."""
    if workers == 1:
        return ""
    return f"{free_bytes // KV_SHARE // (workers * ranks) // MIB}MiB"
