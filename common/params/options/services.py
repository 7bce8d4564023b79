"""Options of `fissile serve`, `fissile worker` and `fissile router` as processes that serve."""

from __future__ import annotations

from typing import Final

import click

from common.limits import (
    DRAIN_TIMEOUT_S,
    LEASE_S,
    MAX_HOLD_S,
    MAX_QUEUED_REQUESTS,
    MAX_UNREAD_TOKENS,
    SLOW_CLIENT_TIMEOUT_S,
    STALL_TIMEOUT_S,
    WORKER_WAIT_S,
)
from common.params.names import DOORS, LEVELS, ROLES
from common.params.options.engine import MODEL_COMMANDS, SERVE, WARMUP, WORKER
from common.params.options.option import FILE, Option
from common.params.options.types import Duration, Fraction, Lease, MetadataKey, Names, PerTenant, TenantPriority

ROUTER: Final = "router"
HTTP: Final = "http"
_PORT: Final = click.IntRange(0, 65535)

CONFIG_FILE: Final = Option(
    "--config", "FISSILE_CONFIG",
    "YAML file with options, one section per command. Command line and environment override it.",
    (SERVE, WORKER, ROUTER, HTTP), FILE, metavar="FILE",
)  # fmt: skip

_PLACES: Final = (
    Option(
        "--revision", "FISSILE_PULL_REVISION", "Branch, tag or commit, as org/name@revision. Default: main.", ("pull",),
    ),
    Option(
        "--file", "FISSILE_PULL_FILE", "GGUF file, or the end of its name: Q4_K_M. As org/name:Q4_K_M.",
        ("pull",), default="", metavar="NAME",
    ),
    Option(
        "--include", "FISSILE_PULL_INCLUDE", "Download files of this pattern too. Repeat it for several patterns.",
        ("pull",), metavar="PATTERN", is_repeatable=True,
    ),
    Option(
        "--model", "FISSILE_MODEL",
        "Checkpoint folder or GGUF file, or org/name[:FILE][@revision] on the Hub. Default: the demo model.",
        (SERVE,), metavar="MODEL",
    ),
    Option(
        "--model", "FISSILE_MODEL",
        "Checkpoint folder or GGUF file, or org/name[:FILE][@revision] on the Hugging Face Hub.",
        MODEL_COMMANDS, metavar="MODEL", is_required=True, field="model", library_default="",
    ),
    Option(
        "--model-name", "FISSILE_MODEL_NAME",
        "Model name in requests. Default: the name of the folder or repository.",
        (SERVE, WORKER),
    ),
    Option(
        "--workers", "FISSILE_NUM_WORKERS",
        "Number of worker processes; they share the cores and a quarter of the free memory.",
        (SERVE,), click.IntRange(1, 64), 1,
    ),
    Option(
        "--worker", "FISSILE_WORKERS",
        "Addresses of workers: HOST:PORT; dns:///NAME:PORT for all addresses of a name, such as a headless Service, "
        "looked up again and again; file:PATH for those that a file lists, read again when it changes. Repeat it, or "
        "separate several by commas. Workers may start before or after the router.",
        (ROUTER,), parameter="workers", metavar="TARGET", is_repeatable=True,
    ),
    Option("--host", "FISSILE_HOST", "Address that the router listens on.", (SERVE, ROUTER), default="127.0.0.1"),
    Option("--host", "FISSILE_WORKER_HOST", "Address that the worker listens on.", (WORKER,), default="127.0.0.1"),
    Option("--port", "FISSILE_PORT", "Port of the router; 0 takes any free one.", (SERVE, ROUTER), _PORT, 50051),
    Option("--port", "FISSILE_WORKER_PORT", "Port of the worker; 0 takes any free one.", (WORKER,), _PORT, 50061),
    Option(
        "--worker-id", "FISSILE_WORKER_ID", "Stable name of the worker. Default: host name and port.",
        (WORKER,), default="",
    ),
    Option(
        "--doors", "FISSILE_DOORS",
        "Engine protocols of other projects that a worker serves on its port too, for their routers: some of "
        f"{', '.join(DOORS)}, separated by commas. Default: none.",
        (SERVE, WORKER), Names(DOORS), (), metavar="NAMES", is_passed_on=True,
    ),
    Option("--ask/--no-ask", "FISSILE_ASK", "Send a first request when the router serves.", (SERVE,), default=True),
    Option("--prompt", "FISSILE_PROMPT", "Prompt of the first request.", (SERVE,), default="Tell me a story."),
    Option("--once", "FISSILE_ONCE", "Exit after the first answer.", (SERVE,), default=False, is_flag=True),
)  # fmt: skip

_QUEUE: Final = (
    Option(
        "--delay-factor", "FISSILE_DELAY_FACTOR",
        "Hold prompts back in the router for this many prefill durations, so that more of them share a prefill; 0 is "
        "off.",
        (SERVE, ROUTER), click.FloatRange(0), 0.0, is_passed_on=True,
    ),
    Option(
        "--max-hold", "FISSILE_MAX_HOLD", "Longest time that --delay-factor holds a prompt back.",
        (ROUTER,), Duration(), MAX_HOLD_S, "max_hold_s",
    ),
    Option(
        "--queue-size", "FISSILE_QUEUE_SIZE",
        "Most requests of one priority class that may wait for a worker. Further ones are refused with "
        "RESOURCE_EXHAUSTED, or displace one of the tenant that has the most waiting for its weight.",
        (ROUTER,), click.IntRange(1), MAX_QUEUED_REQUESTS,
    ),
    Option(
        "--tenant-key", "FISSILE_TENANT_KEY",
        "Metadata key whose value names the tenant of a call. Tenants share the queue fairly, by prompt and output "
        "tokens.",
        (ROUTER,), MetadataKey(), "x-fissile-tenant", metavar="NAME",
    ),
    Option(
        "--tenant-weight", "FISSILE_TENANT_WEIGHT",
        "Share of a tenant in the queue and the service; the others have 1. Repeat it for several tenants.",
        (ROUTER,), PerTenant(float), metavar="TENANT=WEIGHT", is_repeatable=True,
    ),
    Option(
        "--tenant-concurrency", "FISSILE_TENANT_CONCURRENCY",
        "Most requests that a tenant may have in flight; without a name, the limit of each other tenant. 0 is no "
        "limit.",
        (ROUTER,), PerTenant(int), metavar="[TENANT=]N", is_repeatable=True,
    ),
    Option(
        "--tenant-max-priority", "FISSILE_TENANT_MAX_PRIORITY",
        "Highest priority that a tenant's requests may ask for: low, normal or high; without a name, that of each "
        "other tenant. Default: high, or normal with API keys. A key may have a maximum too; the lower one counts.",
        (ROUTER,), TenantPriority(), metavar="[TENANT=]PRIORITY", is_repeatable=True,
    ),
    Option(
        "--require-bound-tenant", "FISSILE_REQUIRE_BOUND_TENANT",
        "Refuse calls that name a tenant in their metadata unless their API key is bound to it. Otherwise a caller can "
        "pose as another tenant in every call, and have as many shares. Calls of all other keys are one tenant "
        "together.",
        (ROUTER,), default=False, is_flag=True,
    ),
    Option(
        "--isolate-tenants", "FISSILE_ISOLATE_TENANTS",
        "Share no prefix cache between tenants, whatever cache_salt their requests name. Otherwise the time to the "
        "first token and cached_tokens tell a tenant whether others have asked the same before. Answers stay the same.",
        (ROUTER,), default=False, is_flag=True,
    ),
    Option(
        "--placement", "FISSILE_PLACEMENT",
        "Which worker a request goes to. prefix_aware: the worker that has the prompt computed first, given its load "
        "and its cache; least_loaded: the worker with the least prompt work waiting; session: requests with the same "
        "session_id to the same worker; round_robin: one after the other, whatever their load.",
        (ROUTER,), click.Choice(("prefix_aware", "least_loaded", "session", "round_robin")), "prefix_aware",
    ),
)  # fmt: skip

_FAILURES: Final = (
    Option(
        "--failover", "FISSILE_FAILOVER",
        "Where an answer that has begun continues when its worker is lost. exact: only on workers of the same numerics "
        "class, with exactly the tokens it would have had; any: on any worker with the same weights.",
        (ROUTER,), click.Choice(("exact", "any")), "exact",
    ),
    Option(
        "--audit", "FISSILE_AUDIT",
        "Part of the answers that another worker of the numerics class computes again, at the lowest priority. A "
        "worker that was wrong is cordoned. 0% is off.",
        (SERVE, ROUTER), Fraction(), 0.0, metavar="FRACTION", is_passed_on=True,
    ),
    Option(
        "--audit-kv/--no-audit-kv", "FISSILE_AUDIT_KV",
        "Compare the KV caches of workers of one numerics class for equal prefixes. A worker that was wrong is "
        "cordoned.",
        (SERVE, ROUTER), default=True, is_passed_on=True,
    ),
    Option(
        "--audit-dir", "FISSILE_AUDIT_DIR",
        "Folder for the answers that were wrong, with their requests, for `fissile verify`. Default: none are kept.",
        (SERVE, ROUTER), FILE, metavar="FOLDER", is_passed_on=True,
    ),
    Option(
        "--worker-wait", "FISSILE_WORKER_WAIT",
        "How long a request waits for a worker to come up if it has none.",
        (ROUTER,), Duration(), WORKER_WAIT_S, "worker_wait_s",
    ),
    Option(
        "--expect-model", "FISSILE_EXPECT_MODELS",
        "Model whose workers may be away, scaled to zero. Requests for it wait for one, up to --worker-wait, and the "
        "router reports SERVING without workers. Repeat it, or separate several by spaces in the variable.",
        (ROUTER,), parameter="expect_models", metavar="NAME", is_repeatable=True,
    ),
    Option(
        "--stall-timeout", "FISSILE_STALL_TIMEOUT",
        "Longest time of an engine step, after which its worker is given up; long prefills get more.",
        (ROUTER,), Duration(), STALL_TIMEOUT_S, "stall_timeout_s",
    ),
    Option(
        "--lease", "FISSILE_LEASE", "How long workers keep this router's requests without hearing from it.",
        (ROUTER,), Lease(), LEASE_S, "lease_s",
    ),
    Option(
        "--default-max-tokens", "FISSILE_DEFAULT_MAX_TOKENS",
        "Longest answer to a request without max_tokens; 0 is as much as the model's length leaves.",
        (ROUTER,), click.IntRange(0), 0, metavar="N",
    ),
    Option(
        "--max-unread-tokens", "FISSILE_MAX_UNREAD_TOKENS",
        "Most tokens of a stream that a client may leave unread; beyond that the stream ends with RESOURCE_EXHAUSTED.",
        (ROUTER,), click.IntRange(1), MAX_UNREAD_TOKENS,
    ),
    Option(
        "--slow-client-timeout", "FISSILE_SLOW_CLIENT_TIMEOUT",
        "Longest time that a client may leave a waiting message unread; then the stream ends with RESOURCE_EXHAUSTED, "
        "and its memory is free again. 0s is never.",
        (ROUTER,), Duration(), SLOW_CLIENT_TIMEOUT_S, "slow_client_timeout_s",
    ),
    Option(
        "--max-connection-age", "FISSILE_MAX_CONNECTION_AGE",
        "Age after which clients must reconnect for new calls, so that they find new routers; running calls continue. "
        "0s is never.",
        (ROUTER,), Duration(), 0.0, "max_connection_age_s",
    ),
    Option(
        "--tokenizer", "FISSILE_TOKENIZER",
        "Folder to take tokenizer and chat template from, instead of from the workers.",
        (ROUTER,), FILE, metavar="FOLDER",
    ),
)  # fmt: skip


def server_tls_rows(prefix: str, *commands: str) -> tuple[Option, ...]:
    """Makes the rows for the TLS of a server's port; the variables begin with `prefix`."""
    return (
        Option(
            "--tls-cert", f"{prefix}_TLS_CERT",
            "Certificate chain of this server, PEM; callers must then use TLS. Read again when it changes.",
            commands, FILE, metavar="FILE",
        ),
        Option(
            "--tls-key", f"{prefix}_TLS_KEY", "Private key of --tls-cert, PEM, not encrypted.",
            commands, FILE, metavar="FILE",
        ),
        Option(
            "--tls-client-ca", f"{prefix}_TLS_CLIENT_CA",
            "CAs of the callers, PEM; each caller must show a certificate of one of them (mTLS). Default: no "
            "certificate is asked for.",
            commands, FILE, metavar="FILE",
        ),
    )  # fmt: skip


def _health_port(prefix: str, command: str) -> Option:
    """Makes the row for the port of health checks; the variable begins with `prefix`."""
    return Option(
        "--health-port", f"{prefix}_HEALTH_PORT",
        "Further port that serves health alone, in plain text, for probes without TLS such as those of Kubernetes; 0 "
        "takes any free one. Default: off.",
        (command,), _PORT,
    )  # fmt: skip


def _metrics_port(prefix: str, *commands: str) -> Option:
    """Makes the row for the port of metrics; the variable begins with `prefix`."""
    return Option(
        "--metrics-port", f"{prefix}_METRICS_PORT",
        "Further port with metrics for Prometheus, at /metrics over HTTP, with the TLS of the main port and without "
        "API keys; 0 takes any free one. Default: off.",
        commands, _PORT, is_passed_on=SERVE in commands,
    )  # fmt: skip


_SECURITY: Final = (
    *server_tls_rows("FISSILE_WORKER", WORKER),
    Option(
        "--router-identity", "FISSILE_ROUTER_IDENTITY",
        "With --tls-client-ca: DNS name or URI (such as a SPIFFE id) in the certificates of routers. All other callers "
        "are refused, except for health. Repeatable; separated by spaces in the variable.",
        (WORKER,), parameter="router_identities", metavar="NAME", is_repeatable=True,
    ),
    _health_port("FISSILE_WORKER", WORKER),
    _metrics_port("FISSILE_WORKER", WORKER),
    *server_tls_rows("FISSILE", SERVE, ROUTER),
    Option(
        "--admin-client-ca", "FISSILE_ADMIN_CLIENT_CA",
        "CAs of the callers of AdminService, PEM. Default: those of --tls-client-ca.",
        (ROUTER,), FILE, metavar="FILE",
    ),
    Option(
        "--worker-ca", "FISSILE_WORKER_CA", "CAs of the workers, PEM; connects to workers with TLS.",
        (ROUTER,), FILE, metavar="FILE",
    ),
    Option(
        "--worker-tls-name", "FISSILE_WORKER_TLS_NAME",
        "Name that every worker's certificate must have. Default: the host of its address.",
        (ROUTER,), default="",
    ),
    Option(
        "--worker-client-cert", "FISSILE_WORKER_CLIENT_CERT",
        "Certificate chain that the router shows to workers, PEM (mTLS). Read again when it changes.",
        (ROUTER,), FILE, metavar="FILE",
    ),
    Option(
        "--worker-client-key", "FISSILE_WORKER_CLIENT_KEY",
        "Private key of --worker-client-cert, PEM, not encrypted.",
        (ROUTER,), FILE, metavar="FILE",
    ),
    Option(
        "--api-keys", "FISSILE_API_KEYS",
        "API keys, hashed: a line each, as `fissile keys new` prints it. Every call but health then needs a key. Read "
        "again when it changes.",
        (SERVE, ROUTER), FILE, metavar="FILE",
    ),
    Option(
        "--api-key-line", "FISSILE_API_KEY_LINES",
        "One line of an --api-keys file. Repeat it, or separate several by spaces in the variable.",
        (ROUTER,), parameter="api_key_lines", metavar="LINE", is_repeatable=True,
    ),
    _health_port("FISSILE", ROUTER),
    _metrics_port("FISSILE", SERVE, ROUTER),
    Option(
        "--admin-port", "FISSILE_ADMIN_PORT",
        "Port of the router's AdminService, for `fissile workers`, `cordon`, `routing` and others; 0 takes any free "
        "one. Default: off.",
        (SERVE, ROUTER), _PORT, is_passed_on=True,
    ),
    Option(
        "--scaler-port", "FISSILE_SCALER_PORT",
        "Further port on which the router is KEDA's external scaler, with the TLS of the main port and without API "
        "keys; 0 takes any free one. Default: off.",
        (ROUTER,), _PORT,
    ),
    Option("--admin-host", "FISSILE_ADMIN_HOST", "Address of AdminService.", (ROUTER,), default="127.0.0.1"),
)  # fmt: skip

_PROCESS: Final = (
    Option(
        "--trace-slow", "FISSILE_TRACE_SLOW",
        "Keep the traces of requests that take at least this time, and of failed ones, whatever OTEL_TRACES_SAMPLER "
        "says; costs as much as tracing all. Default: the sampler decides alone.",
        (SERVE, WORKER, ROUTER), Duration(), is_passed_on=True,
    ),
    Option(
        "--role", "FISSILE_WORKER_ROLE",
        "Half of the work that the worker does. prefill: prompts, whose requests then move on; decode: the rest of "
        "their answers. Both find the blocks in the --kv-tiers that they share. The others do a half that has no "
        "workers of its own.",
        (WORKER,), click.Choice(ROLES), ROLES[0],
    ),
    Option(
        "--drain-timeout", "FISSILE_DRAIN_TIMEOUT", "How long running requests may continue after SIGTERM or Ctrl-C.",
        (SERVE, WORKER), Duration(), DRAIN_TIMEOUT_S,
    ),
    Option(
        "--drain-timeout", "FISSILE_DRAIN_TIMEOUT", "How long streams may continue after SIGTERM or Ctrl-C.",
        (ROUTER, HTTP), Duration(), DRAIN_TIMEOUT_S, "drain_timeout_s",
    ),
    Option(
        "--log-level", "FISSILE_LOG_LEVEL", "Lowest level that is logged.",
        (SERVE, WORKER, ROUTER, HTTP, WARMUP, "pull"), click.Choice(LEVELS), "info",
    ),
)  # fmt: skip

PLACES: Final = (CONFIG_FILE, *_PLACES)
SERVING: Final = (*_QUEUE, *_FAILURES, *_SECURITY, *_PROCESS)
"""Rows of this file."""
