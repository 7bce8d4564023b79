"""The ASGI application of the facade: which path is served by which translator, in which form failures are told."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from fissile.client import AsyncClient, FissileError
from fissile.client.base import get_model, list_models
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.limits import CORS_MAX_AGE_S, HEALTH_KEPT_S, HEALTH_TIMEOUT_S
from common.rpc.server import READINESS
from common.telemetry.request_record import shown
from common.version import fissile_version
from facade.anthropic import messages
from facade.anthropic.message_events import error_form
from facade.fleet_metrics import PATH as METRICS_PATH
from facade.fleet_metrics import FleetMetrics
from facade.http.errors import ErrorForm, HttpError
from facade.http.exchange import Exchange
from facade.http.runner import AnswerPlan, AnswerRunner, QuestionPlan
from facade.http.uploads import ClientGoneError, UploadTable
from facade.openai import chat, completions, models, responses, token_generation, vectors
from facade.openai.sampling import error_body

# Paths of Anthropic's door begin so.
_MESSAGES: Final = "/v1/messages"
# State of a facade that serves.
_OK: Final = "ok"


class FacadeHealth:
    """State of this process for `/health`.

    Args:
        client: calls the routers.

    Attributes:
        is_ending: True while the process ends: balancers then send no new requests.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.is_ending = False
        self._client = client
        self._state = ""
        self._seen_at = -math.inf
        self._lock = asyncio.Lock()

    async def respond(self, exchange: Exchange) -> None:
        """Responds with 200 if a router serves a model, or lets requests wait for its workers; else with 503."""
        exchange.is_probe = True
        # Probes that arrive meanwhile wait for the same answer.
        async with self._lock:
            if time.monotonic() - self._seen_at > HEALTH_KEPT_S:
                self._state, self._seen_at = await self._look(), time.monotonic()
        state = "ending" if self.is_ending else self._state
        await exchange.respond_json({"status": state}, 200 if state == _OK else 503)

    async def _look(self) -> str:
        """The state of the first router that serves, else that of the models; after HEALTH_TIMEOUT_S at the latest."""
        checks = [self._router_state(target) for target in self._client.connection.targets]
        looks = [asyncio.ensure_future(look) for look in (self._model_state(), *checks)]
        try:
            for look in asyncio.as_completed(looks):
                if await look == _OK:
                    return _OK
            return looks[0].result()
        finally:
            for each in looks:
                each.cancel()

    async def _model_state(self) -> str:
        try:
            found = await self._client.models(timeout_s=HEALTH_TIMEOUT_S)
        except FissileError as error:
            # A router that wants a key answers.
            return _OK if error.reason.startswith("API_KEY") else "no router answers"
        return _OK if any(model.ready_workers for model in found) else "no worker is ready"

    async def _router_state(self, target: str) -> str:
        """`ok` if a router reports SERVING. Without workers it does so only if requests may wait for them."""
        stub = health_pb2_grpc.HealthStub(self._client.channel(target))
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=READINESS), timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return "no router answers"
        return _OK if answer.status == health_pb2.HealthCheckResponse.SERVING else "no worker is ready"


@dataclass(frozen=True)
class FacadeApp:
    """The client, the runner and the options that all routes share.

    Attributes:
        client: calls the routers.
        runner: answers requests for generation.
        timeout_s: deadline of requests that name none.
        origins: of web pages that may call, `*` for all.
        metrics: of the routers; None serves none.
        uploads: bodies of all requests while they arrive.
        created: Unix seconds of the start.
    """

    client: AsyncClient
    runner: AnswerRunner
    timeout_s: float
    origins: Sequence[str] = ()
    metrics: FleetMetrics | None = None
    uploads: UploadTable = field(default_factory=UploadTable)
    created: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def health(self) -> FacadeHealth:
        """Health of this process, for `/health` and its drain."""
        return FacadeHealth(self.client)

    def asgi(self, more: Sequence[BaseRoute] = ()) -> ASGIApp:
        """The application; `more` are further routes."""
        cors = Middleware(
            CORSMiddleware,
            allow_origins=self.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"],
            max_age=CORS_MAX_AGE_S,
        )
        app = Starlette(
            routes=[*self.routes(), *more],
            middleware=[cors] if self.origins else [],
        )
        # A redirect to the path without a slash at its end has the scheme and host of this process, not of a proxy.
        app.router.redirect_slashes = False
        app.router.default = Endpoint(_refuse_path, self.uploads, self.timeout_s)
        return app

    def routes(self) -> list[Route]:
        """The route of each path."""
        return [
            self._generation("/v1/chat/completions", chat.parse, error_body),
            self._generation("/v1/responses", responses.parse, error_body),
            self._generation(_MESSAGES, messages.parse, error_form),
            self._question("/v1/messages/count_tokens", messages.parse_count, error_form),
            self._generation("/v1/completions", completions.parse, error_body),
            self._generation("/inference/v1/generate", token_generation.parse, error_body),
            self._question("/v1/embeddings", vectors.parse_embeddings, error_body),
            self._question("/v1/rerank", vectors.parse_rerank, error_body),
            self._question("/tokenize", models.parse_tokenize, error_body),
            self._question("/detokenize", models.parse_detokenize, error_body),
            self._lookup("/v1/models", self._list_models),
            self._lookup("/v1/models/{model:path}", self._get_model),
            self._lookup("/health", self.health.respond),
            self._lookup("/version", _version),
            *self._metrics_route(),
        ]

    def _metrics_route(self) -> list[Route]:
        if self.metrics is None:
            return []
        return [self._lookup(METRICS_PATH, self.metrics.respond)]

    def _lookup(self, path: str, handle: Callable[[Exchange], Awaitable[None]]) -> Route:
        """The route of a request without a body."""
        return Route(path, Endpoint(handle, self.uploads, self.timeout_s, ("GET", "HEAD")))

    def _list_models(self, exchange: Exchange) -> Awaitable[None]:
        plan = QuestionPlan(list_models(), functools.partial(models.models_json, created=self.created))
        return self.runner.ask(exchange, lambda _: plan, error_body)

    def _get_model(self, exchange: Exchange) -> Awaitable[None]:
        name = exchange.path.removeprefix("/v1/models/")
        shown = functools.partial(models.model_json, created=self.created)
        return self.runner.ask(exchange, lambda _: QuestionPlan(get_model(name), shown), error_body)

    def _generation(self, path: str, parse: Callable[[bytes, int], AnswerPlan], form: ErrorForm) -> Route:
        """The route of a translator for generation."""

        async def handle(exchange: Exchange) -> None:
            await self.runner.answer(exchange, parse, form)

        return Route(path, Endpoint(handle, self.uploads, self.timeout_s, ("POST",)))

    def _question(self, path: str, parse: Callable[[bytes], QuestionPlan[Any]], form: ErrorForm) -> Route:
        """The route of a translator for calls with one answer."""

        async def handle(exchange: Exchange) -> None:
            await self.runner.ask(exchange, parse, form)

        return Route(path, Endpoint(handle, self.uploads, self.timeout_s, ("POST",)))


class Endpoint:
    """ASGI endpoint that makes an exchange of each request, and writes its log line.

    Args:
        handle: responds.
        uploads: bodies of all requests while they arrive.
        timeout_s: deadline of requests that name none.
        methods: that the path has; none for any.
    """

    def __init__(
        self,
        handle: Callable[[Exchange], Awaitable[None]],
        uploads: UploadTable,
        timeout_s: float,
        methods: Sequence[str] = (),
    ) -> None:
        self._handle = handle
        self._uploads = uploads
        self._timeout_s = timeout_s
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = Exchange(scope, receive, send, self._uploads, self._timeout_s)
        crash: BaseException | None = None
        try:
            await self._respond(exchange)
        except ClientGoneError:
            exchange.facts.setdefault("reason", "CLIENT_GONE")
        except Exception as error:
            crash = error
        finally:
            exchange.log_end(crash)

    async def _respond(self, exchange: Exchange) -> None:
        if not self._methods or exchange.method in self._methods:
            await self._handle(exchange)
            return
        failure = HttpError(405, f"{shown(exchange.path)} has no method {shown(exchange.method, 32)}", "WRONG_METHOD")
        await _refuse(exchange, failure, [(b"allow", ", ".join(self._methods).encode())])


async def _version(exchange: Exchange) -> None:
    await exchange.respond_json({"version": fissile_version()})


async def _refuse_path(exchange: Exchange) -> None:
    await _refuse(exchange, HttpError(404, f"{shown(exchange.path)} does not exist", "UNKNOWN_PATH"))


async def _refuse(exchange: Exchange, failure: HttpError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Refuses a request by its path or method, in the form of the door that the path belongs to."""
    form: ErrorForm = error_form if exchange.path.startswith(_MESSAGES) else error_body
    exchange.note(failure)
    await exchange.respond_json(form(failure), failure.status, headers)
