"""Options that a facade is started with, and its command `fissile http`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fissile.client.connections import is_key

from common.cli.core.errors import CommandError
from common.cli.core.tls_options import client_tls, server_tls
from common.params.options.services import HTTP
from common.params.options.table import default_of
from common.rpc.tls import ClientTls, ServerTls


@dataclass(frozen=True, slots=True)
class FacadeOptions:
    """Options of one facade; times in seconds.

    Attributes:
        routers: addresses of the routers of one fleet.
        host: address to listen on.
        port: port to listen on; 0 takes any free one.
        connection: further arguments of the client of the routers: TLS.
        router_metrics: addresses of the routers' ports for metrics.
        router_tls: for these ports; None is plain text.
        tls: of the HTTP port; None is plain text.
        api_key: shown to routers for callers that send none.
        origins: of web pages that may call; `*` is all.
        timeout_s: deadline of requests that name none.
        give_up_s: how long a broken call is made again while no message arrives.
        drain_timeout_s: how long streams may continue after SIGTERM.
        log_level: lowest level that is logged.
    """

    routers: Sequence[str]
    host: str = default_of(HTTP, "host")
    port: int = default_of(HTTP, "port")
    connection: Mapping[str, Any] = field(default_factory=dict)
    router_metrics: Sequence[str] = ()
    router_tls: ClientTls | None = None
    tls: ServerTls | None = None
    api_key: str = field(default="", repr=False)
    origins: Sequence[str] = ()
    timeout_s: float = default_of(HTTP, "timeout")
    give_up_s: float = default_of(HTTP, "give_up")
    drain_timeout_s: float = default_of(HTTP, "drain_timeout_s")
    log_level: str = default_of(HTTP, "log_level")

    @classmethod
    def from_parameters(cls, given: Mapping[str, Any]) -> FacadeOptions:
        """Makes the options from the values of `fissile http`.

        Raises:
            CommandError: TLS lacks a file, or the key has a character that no key has.
        """
        if not is_key(given["api_key"]):
            raise CommandError("the API key has a character that no key has, such as a line break: see FISSILE_API_KEY")
        tls = _router_tls(given)
        return cls(
            routers=given["addresses"],
            host=given["host"],
            port=given["port"],
            connection=_connection(tls),
            router_metrics=given["router_metrics"],
            router_tls=tls,
            tls=server_tls(given["tls_cert"], given["tls_key"], given["tls_client_ca"]),
            api_key=given["api_key"],
            origins=given["origins"],
            timeout_s=given["timeout"],
            give_up_s=given["give_up"],
            drain_timeout_s=given["drain_timeout_s"],
            log_level=given["log_level"],
        )


def _router_tls(given: Mapping[str, Any]) -> ClientTls | None:
    cert: Path | None = given["router_client_cert"]
    key: Path | None = given["router_client_key"]
    return client_tls(ca=given["router_ca"], cert=cert, key=key, name=given["router_tls_name"], prefix="--router-")


def _connection(tls: ClientTls | None) -> Mapping[str, Any]:
    if tls is None:
        return {}
    shown = {"client_cert": (tls.cert, tls.key)} if tls.cert is not None else {}
    return {"tls": True, "tls_ca": tls.ca, "tls_name": tls.name, **shown}
