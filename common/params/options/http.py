"""Options of `fissile http` besides those that every server has."""

from __future__ import annotations

from typing import Final

import click

from common.params.options.engine import SERVE
from common.params.options.option import FILE, Option
from common.params.options.services import HTTP, server_tls_rows
from common.params.options.types import SHORTEST_S, Duration

_PORT: Final = click.IntRange(0, 65535)

FACADE: Final = (
    Option(
        "--routers", "FISSILE_ROUTERS",
        "Addresses of routers of one fleet, or a name that stands for several: an answer whose router is lost "
        "continues at the next one.",
        (HTTP,), default="127.0.0.1:50051", parameter="addresses", metavar="HOST:PORT[,...]",
    ),
    Option("--host", "FISSILE_HTTP_HOST", "Address that the facade listens on.", (HTTP,), default="127.0.0.1"),
    Option("--port", "FISSILE_HTTP_PORT", "Port of the facade; 0 takes any free one.", (HTTP,), _PORT, 8000),
    Option(
        "--http-port", "FISSILE_SERVE_HTTP_PORT",
        "Also run an HTTP facade (`fissile http`) on this port of --host, with the router's certificate and CAs of "
        "callers; 0 takes any free one. Default: off.",
        (SERVE,), _PORT,
    ),
    *server_tls_rows("FISSILE_HTTP", HTTP),
    Option(
        "--router-ca", "FISSILE_ROUTER_CA",
        "CAs of the routers, PEM; the facade connects to routers with TLS. Default of `fissile serve` with --tls-cert: "
        "that file.",
        (SERVE, HTTP), FILE, metavar="FILE",
    ),
    Option(
        "--router-tls-name", "FISSILE_ROUTER_TLS_NAME",
        "Name that every router's certificate must have. Default: the host of its address.",
        (SERVE, HTTP), default="",
    ),
    Option(
        "--router-client-cert", "FISSILE_ROUTER_CLIENT_CERT",
        "Certificate chain that the facade shows to routers, PEM (mTLS).",
        (SERVE, HTTP), FILE, metavar="FILE",
    ),
    Option(
        "--router-metrics", "FISSILE_ROUTER_METRICS",
        "Address of a router's --metrics-port, or a name that stands for several: /metrics then has their figures "
        "together. Repeatable; separated by spaces in the variable. Default: /metrics is not served.",
        (HTTP,), metavar="HOST:PORT", is_repeatable=True,
    ),
    Option(
        "--router-client-key", "FISSILE_ROUTER_CLIENT_KEY",
        "Private key of --router-client-cert, PEM, not encrypted.",
        (SERVE, HTTP), FILE, metavar="FILE",
    ),
    Option(
        "--api-key", "FISSILE_HTTP_API_KEY",
        "API key for callers that send none: whoever reaches the port then uses it. Default: none, so that routers "
        "with API keys refuse such callers. Better set by the variable: other users of this machine can see command "
        "lines.",
        (HTTP,), default="", metavar="KEY",
    ),
    Option(
        "--cors-origin", "FISSILE_HTTP_CORS_ORIGINS",
        "Origin of web pages that may call from a browser, such as https://chat.example.com; * is every page. "
        "Repeatable; separated by spaces in the variable. Default: none.",
        (HTTP,), parameter="origins", metavar="ORIGIN", is_repeatable=True,
    ),
    Option(
        "--timeout", "FISSILE_HTTP_TIMEOUT",
        "Deadline of requests without the header x-request-timeout-ms.",
        (HTTP,), Duration(SHORTEST_S), 600.0,
    ),
    Option(
        "--give-up", "FISSILE_HTTP_GIVE_UP",
        "How long a failed call is repeated; 0s is never. A router that waits this long for a worker is asked once.",
        (HTTP,), Duration(), 30.0,
    ),
)  # fmt: skip
"""Rows of this file."""
