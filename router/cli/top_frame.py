"""One frame of `fissile top`: tables of workers, tenants and requests from two snapshots of a router. Pure.

Times in seconds. Rates compare the latest snapshot with an earlier one of the same router process. A mean in
parentheses is that of all answers since the router started: none began, or none ended, between the two snapshots.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from fissile.admin.v1 import admin_pb2 as apb
from fissile.v1 import inference_pb2 as pb
from prompt_toolkit.utils import get_cwidth

from common.rpc.durations import to_seconds
from router.cli.workers import state_of

_Row = TypeVar("_Row")
_GAP: Final = 1
_NARROWEST: Final = 8
# Rows of a table without the focus, in a terminal.
_FEW: Final = 4
KEYS: Final = "q quit  w workers  t tenants  r requests  s sort  S reverse  up/down select  enter look into  esc back"


class FrameLine(NamedTuple):
    """One line of a frame, and its style for prompt_toolkit."""

    text: str
    style: str = ""


class FrameTable(enum.Enum):
    """A table of the frame."""

    WORKERS = "workers"
    TENANTS = "tenants"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a router at one moment.

    Attributes:
        at: monotonic seconds.
        load: workers and queues.
        requests: the oldest requests in flight.
        has_more: True if there are requests that `requests` leaves out.
        routing: settings of admission and placement.
        info: the router itself.
    """

    at: float
    load: apb.WatchLoadResponse
    requests: Sequence[apb.InFlightRequest]
    has_more: bool
    routing: apb.Routing
    info: apb.GetServerInfoResponse


@dataclass(frozen=True, slots=True)
class View:
    """Choice of the user: a table, its order, and a row.

    Attributes:
        table: the table with the focus.
        column: number of the column by which that table is sorted.
        is_reversed: True if the order is reversed.
        selected: key of the selected row; "" or a key that is gone selects the first row.
        is_open: True if the frame shows the selected row alone, with all its fields.
    """

    table: FrameTable = FrameTable.WORKERS
    column: int = 0
    is_reversed: bool = False
    selected: str = ""
    is_open: bool = False


class _Rates(NamedTuple):
    """Speeds of a worker between two snapshots, None if unknown. `has_ttft` and `has_tpot`: measured between them."""

    tokens_s: float | None
    ttft_s: float | None
    has_ttft: bool
    tpot_s: float | None
    has_tpot: bool


class _WorkerRow(NamedTuple):
    worker: apb.Worker
    rates: _Rates


class _RequestRow(NamedTuple):
    request: apb.InFlightRequest
    tokens_s: float | None


class _TenantRow(NamedTuple):
    name: str
    in_flight: int
    queued: int
    tokens_s: float | None
    weight: float
    limit: int


class _Column(NamedTuple, Generic[_Row]):
    """A column of a table; `width` 0 gives it the room that the others leave."""

    heading: str
    width: int
    cell: Callable[[_Row], str]
    sort_key: Callable[[_Row], Any]
    is_left: bool = False


_WORKER_COLUMNS: Final[Sequence[_Column[_WorkerRow]]] = (
    _Column("WORKER", 0, lambda row: name_of(row.worker), lambda row: name_of(row.worker), is_left=True),
    _Column("STATE", 11, lambda row: state_of(row.worker), lambda row: row.worker.state, is_left=True),
    _Column("RUN", 4, lambda row: str(row.worker.decoding_seqs), lambda row: -row.worker.decoding_seqs),
    _Column("WAIT", 5, lambda row: str(_waiting(row.worker)), lambda row: -_waiting(row.worker)),
    _Column("GATE", 5, lambda row: "held" if row.worker.held else "open", lambda row: not row.worker.held),
    _Column("KV", 4, lambda row: _share(_kv_use(row.worker)), lambda row: -(_kv_use(row.worker) or 0.0)),
    _Column("TOK/S", 6, lambda row: _short(row.rates.tokens_s), lambda row: -(row.rates.tokens_s or 0.0)),
    _Column("TTFT", 7, lambda row: _mean(row.rates.ttft_s, row.rates.has_ttft), lambda row: -(row.rates.ttft_s or 0.0)),
    _Column("TPOT", 7, lambda row: _mean(row.rates.tpot_s, row.rates.has_tpot), lambda row: -(row.rates.tpot_s or 0.0)),
    _Column("VERSION", 8, lambda row: row.worker.version or "-", lambda row: row.worker.version),
)
_TENANT_COLUMNS: Final[Sequence[_Column[_TenantRow]]] = (
    _Column("TENANT", 0, lambda row: row.name or "-", lambda row: row.name, is_left=True),
    _Column("REQUESTS", 9, lambda row: str(row.in_flight), lambda row: -row.in_flight),
    _Column("WAIT", 5, lambda row: str(row.queued), lambda row: -row.queued),
    _Column("TOK/S", 6, lambda row: _short(row.tokens_s), lambda row: -(row.tokens_s or 0.0)),
    _Column("WEIGHT", 7, lambda row: f"{row.weight:g}", lambda row: -row.weight),
    _Column("LIMIT", 6, lambda row: str(row.limit or "-"), lambda row: -row.limit),
)
_REQUEST_COLUMNS: Final[Sequence[_Column[_RequestRow]]] = (
    _Column("REQUEST", 0, lambda row: row.request.request_id, lambda row: row.request.request_id, is_left=True),
    _Column("TENANT", 8, lambda row: row.request.tenant or "-", lambda row: row.request.tenant, is_left=True),
    _Column("STATE", 9, lambda row: _progress(row.request), lambda row: row.request.state, is_left=True),
    _Column("AGE", 6, lambda row: _time(to_seconds(row.request.age)), lambda row: -to_seconds(row.request.age)),
    _Column("PROMPT", 7, lambda row: _short(row.request.prompt_tokens), lambda row: -row.request.prompt_tokens),
    _Column("OUTPUT", 7, lambda row: _short(row.request.output_tokens), lambda row: -row.request.output_tokens),
    _Column("TOK/S", 6, lambda row: _short(row.tokens_s), lambda row: -(row.tokens_s or 0.0)),
    _Column("WORKER", 9, lambda row: row.request.worker_id or "-", lambda row: row.request.worker_id, is_left=True),
)
_NUM_COLUMNS: Final = {
    FrameTable.WORKERS: len(_WORKER_COLUMNS),
    FrameTable.TENANTS: len(_TENANT_COLUMNS),
    FrameTable.REQUESTS: len(_REQUEST_COLUMNS),
}


class _Contents:
    """The rows of all tables of a frame, in the order of the view."""

    def __init__(self, latest: Snapshot, earlier: Snapshot | None, view: View) -> None:
        same = earlier is not None and earlier.info.router_id == latest.info.router_id
        self._earlier = earlier if same else None
        self.latest = latest
        self.view = view
        self.workers = self._sorted(FrameTable.WORKERS, _WORKER_COLUMNS, self._worker_rows())
        self.requests = self._sorted(FrameTable.REQUESTS, _REQUEST_COLUMNS, self._request_rows())
        self.tenants = self._sorted(FrameTable.TENANTS, _TENANT_COLUMNS, self._tenant_rows())

    def keys(self) -> list[str]:
        """Keys of the rows of the table with the focus."""
        if self.view.table is FrameTable.WORKERS:
            return [row.worker.address for row in self.workers]
        if self.view.table is FrameTable.TENANTS:
            return [row.name for row in self.tenants]
        return [_request_key(row.request) for row in self.requests]

    @property
    def selected(self) -> int:
        """Index of the selected row."""
        keys = self.keys()
        return keys.index(self.view.selected) if self.view.selected in keys else 0

    def _sorted(self, table: FrameTable, columns: Sequence[_Column[_Row]], rows: Sequence[_Row]) -> list[_Row]:
        # Rows that are equal in the chosen column stay in the order of their names.
        named = sorted(rows, key=columns[0].sort_key)
        if self.view.table is not table:
            return named
        return sorted(named, key=columns[self.view.column].sort_key, reverse=self.view.is_reversed)

    @property
    def _between_s(self) -> float:
        return 0.0 if self._earlier is None else self.latest.at - self._earlier.at

    def _worker_rows(self) -> list[_WorkerRow]:
        before = {} if self._earlier is None else {each.address: each for each in self._earlier.load.workers}
        return [
            _WorkerRow(worker, _rates(worker.answers, before.get(worker.address), self._between_s))
            for worker in self.latest.load.workers
        ]

    def _request_rows(self) -> list[_RequestRow]:
        before = {} if self._earlier is None else {_request_key(one): one for one in self._earlier.requests}
        rows = []
        for request in self.latest.requests:
            earlier = before.get(_request_key(request))
            since_s = self._between_s if earlier is not None else to_seconds(request.age)
            tokens = request.output_tokens - (0 if earlier is None else earlier.output_tokens)
            rows.append(_RequestRow(request, max(0, tokens) / since_s if since_s > 0 else None))
        return rows

    def _tenant_rows(self) -> list[_TenantRow]:
        routing = self.latest.routing
        named = {*routing.tenant_weight, *routing.tenant_concurrency, *(row.request.tenant for row in self.requests)}
        return [self._tenant_row(name, routing) for name in sorted(named)]

    def _tenant_row(self, name: str, routing: apb.Routing) -> _TenantRow:
        own = [row for row in self.requests if row.request.tenant == name]
        queued = sum(row.request.state <= apb.REQUEST_STATE_QUEUED for row in own)
        limit = routing.tenant_concurrency.get(name, routing.tenant_concurrency.get("", 0))
        weight = routing.tenant_weight.get(name, 1.0)
        return _TenantRow(name, len(own), queued, sum(row.tokens_s or 0.0 for row in own), weight, limit)


def frame(
    latest: Snapshot,
    earlier: Snapshot | None,
    view: View,
    now: float,
    *,
    columns: int = 80,
    rows: int | None = None,
    trouble: str = "",
) -> list[FrameLine]:
    """The lines of a frame, none wider than `columns`.

    Args:
        latest: the newest snapshot.
        earlier: one before it, None without one.
        view: the user's choice.
        now: monotonic seconds.
        columns: width of the terminal.
        rows: height of the terminal, None for a frame of any height without keys.
        trouble: why the router gives no newer snapshot, "" if it does.
    """
    contents = _Contents(latest, earlier, view)
    head = list(_head(contents, now, trouble))
    foot = [] if rows is None else [FrameLine(KEYS, "class:keys")]
    room = None if rows is None else max(0, rows - len(head) - len(foot))
    body = list(_detail(contents, columns) if view.is_open else _tables(contents, columns, room))
    if room is not None:
        body = [*body[:room], *[FrameLine("")] * (room - len(body))]
    return [FrameLine(_cut(line.text, columns), line.style) for line in (*head, *body, *foot)]


def press(key: str, view: View, latest: Snapshot, earlier: Snapshot | None) -> View:
    """The view after a key; keys without a meaning change nothing."""
    tables = {"w": FrameTable.WORKERS, "t": FrameTable.TENANTS, "r": FrameTable.REQUESTS}
    if key in tables:
        return View(tables[key])
    if key == "s":
        return replace(view, column=(view.column + 1) % _NUM_COLUMNS[view.table])
    if key == "S":
        return replace(view, is_reversed=not view.is_reversed)
    if key == "escape":
        return replace(view, is_open=False)
    contents = _Contents(latest, earlier, view)
    keys = contents.keys()
    if not keys:
        return view
    if key == "enter":
        return replace(view, selected=keys[contents.selected], is_open=True)
    steps = {"up": -1, "down": 1}
    if key in steps and not view.is_open:
        return replace(view, selected=keys[min(max(0, contents.selected + steps[key]), len(keys) - 1)])
    return view


def name_of(worker: apb.Worker) -> str:
    """A worker's name, or its address before it gave itself one."""
    return worker.worker_id or worker.address


def _head(contents: _Contents, now: float, trouble: str) -> Iterator[FrameLine]:
    latest = contents.latest
    load, info, routing = latest.load, latest.info, latest.routing
    up = _time(to_seconds(info.uptime) + now - latest.at)
    yield FrameLine(
        f"fissile top  {info.address}  router {info.router_id[:8]}  version {info.version}  up {up}", "bold"
    )
    if trouble:
        yield FrameLine(f"router gone for {_time(now - latest.at)}, trying again: {trouble}", "class:trouble")
    waiting = ", ".join(
        f"{pb.Priority.Name(queue.priority).removeprefix('PRIORITY_').lower()} {queue.waiting}"
        + f" (oldest {_time(to_seconds(queue.oldest_age))})"
        for queue in load.queues
        if queue.waiting
    )
    tokens_s = [row.rates.tokens_s for row in contents.workers if row.rates.tokens_s is not None]
    speed = f"; {_short(sum(tokens_s))} tokens/s" if tokens_s else ""
    yield FrameLine(f"{load.in_flight} in flight{speed}; waiting here: {waiting or 'none'}")
    held = sum(worker.held for worker in load.workers)
    gate = (
        f"delay factor {routing.delay_factor:g}, at most {_time(to_seconds(routing.max_hold))}, shut at {held}"
        if routing.delay_factor
        else "off"
    )
    yield FrameLine(f"gate: {gate}; placement: {routing.placement}")


def _tables(contents: _Contents, columns: int, room: int | None) -> Iterator[FrameLine]:
    """All tables; in a terminal, the one with the focus has the room that the others leave."""
    made: dict[FrameTable, Callable[[int | None], list[FrameLine]]] = {
        FrameTable.WORKERS: lambda most: _table(
            contents, FrameTable.WORKERS, _WORKER_COLUMNS, contents.workers, columns, most
        ),
        FrameTable.TENANTS: lambda most: _table(
            contents, FrameTable.TENANTS, _TENANT_COLUMNS, contents.tenants, columns, most
        ),
        FrameTable.REQUESTS: lambda most: _table(
            contents, FrameTable.REQUESTS, _REQUEST_COLUMNS, contents.requests, columns, most
        ),
    }
    few = None if room is None else _FEW
    lines = {table: make(few) for table, make in made.items()}
    focus = contents.view.table
    if room is not None:
        others = sum(len(lines[table]) for table in made if table is not focus)
        lines[focus] = made[focus](max(1, room - others - 3))
    for table in made:
        yield from lines[table]


def _table(
    contents: _Contents,
    table: FrameTable,
    columns: Sequence[_Column[_Row]],
    rows: Sequence[_Row],
    width: int,
    most: int | None,
) -> list[FrameLine]:
    """An empty line, the headings, the rows and the number of rows left out; at most `most` rows."""
    has_focus = contents.view.table is table
    taken = sum(column.width + _GAP for column in columns if column.width)
    widths = [column.width or max(_NARROWEST, width - taken) for column in columns]
    marks = [
        column.heading + ("*" if has_focus and number == contents.view.column else "")
        for number, column in enumerate(columns)
    ]
    lines = [
        FrameLine(""),
        FrameLine(_joined(columns, widths, marks), "class:heading bold" if has_focus else "class:heading"),
    ]
    if not rows:
        return [*lines, FrameLine("none")]
    first = 0
    if most is not None and has_focus:
        first = min(max(0, contents.selected - most + 1), max(0, len(rows) - most))
    shown = rows[first : None if most is None else first + most]
    for number, row in enumerate(shown, start=first):
        is_selected = has_focus and most is not None and number == contents.selected
        lines.append(
            FrameLine(
                _joined(columns, widths, [column.cell(row) for column in columns]), "reverse" if is_selected else ""
            )
        )
    left = len(rows) - len(shown)
    if left or (table is FrameTable.REQUESTS and contents.latest.has_more):
        more = f"{left} more" if left else "the oldest ones only"
        lines.append(FrameLine(f"({more})"))
    return lines


def _joined(columns: Sequence[_Column[_Row]], widths: Sequence[int], cells: Sequence[str]) -> str:
    padded = (
        _padded(cell, width, is_left=column.is_left) for column, width, cell in zip(columns, widths, cells, strict=True)
    )
    return (" " * _GAP).join(padded).rstrip()


def _detail(contents: _Contents, columns: int) -> Iterator[FrameLine]:
    """All fields of the selected row, and with a worker or a tenant its requests."""
    if not contents.keys():
        yield FrameLine("none")
        return
    view, index = contents.view, contents.selected
    yield FrameLine("")
    if view.table is FrameTable.REQUESTS:
        yield from _fields(_request_fields(contents.requests[index]))
        return
    if view.table is FrameTable.WORKERS:
        row = contents.workers[index]
        yield from _fields(_worker_fields(row))
        own = [one for one in contents.requests if one.request.worker_id == row.worker.worker_id]
    else:
        tenant = contents.tenants[index]
        yield from _fields({"tenant": tenant.name or "-", "weight": f"{tenant.weight:g}", "limit": str(tenant.limit)})
        own = [one for one in contents.requests if one.request.tenant == tenant.name]
    yield from _table(contents, FrameTable.REQUESTS, _REQUEST_COLUMNS, own, columns, None)


def _fields(fields: Mapping[str, str]) -> Iterator[FrameLine]:
    width = max(map(len, fields)) + 2
    for name, value in fields.items():
        yield FrameLine(f"{name:{width}}{value or '-'}")


def _worker_fields(row: _WorkerRow) -> dict[str, str]:
    worker = row.worker
    verified, accepted = (sum(getattr(one, name) for one in worker.drafts) for name in ("verified", "accepted"))
    drafts = f"{worker.draft_method}, {_share(accepted / verified if verified else None)} accepted"
    return {
        "worker": worker.worker_id,
        "state": state_of(worker) + (f": {worker.last_error}" if worker.last_error else ""),
        "address": worker.address,
        "instance": worker.instance_id,
        "model": worker.model,
        "numerics": worker.numerics,
        "version": f"{worker.version}, kernels {worker.kernels}",
        "requests": f"{worker.running} of this router run, {worker.queued} wait here for it",
        "sequences": f"{worker.decoding_seqs} decode, {worker.waiting_seqs} wait there (of all routers)",
        "KV blocks": f"{worker.total_blocks - worker.free_blocks} of {worker.total_blocks} used",
        "prompt tokens": f"{worker.outstanding_tokens} to compute, {worker.prefill_rate:.0f} a second",
        "answers": f"{worker.answers.first_tokens} begun, {worker.answers.output_tokens} tokens",
        "drafts": drafts if worker.draft_method else "",
        "last report": f"{_time(to_seconds(worker.report_age))} old",
    }


def _request_fields(row: _RequestRow) -> dict[str, str]:
    request = row.request
    return {
        "request": request.request_id,
        "trace": request.trace_id,
        "tenant": request.tenant,
        "model": request.model,
        "method": request.method,
        "priority": pb.Priority.Name(request.priority).removeprefix("PRIORITY_").lower(),
        "state": _progress(request),
        "age": _time(to_seconds(request.age)),
        "prompt": f"{request.prompt_tokens} tokens",
        "output": f"{request.output_tokens} tokens, {_short(row.tokens_s)} a second",
        "worker": request.worker_id,
        "attempts": str(request.attempts),
    }


def _rates(answers: apb.AnswerTotals, before: apb.Worker | None, between_s: float) -> _Rates:
    old = apb.AnswerTotals() if before is None else before.answers
    tokens_s = None
    if before is not None and between_s > 0:
        tokens_s = max(0, answers.output_tokens - old.output_tokens) / between_s
    ttft_s, has_ttft = _recent_mean(
        answers.first_tokens,
        old.first_tokens,
        to_seconds(answers.time_to_first_token),
        to_seconds(old.time_to_first_token),
    )
    tpot_s, has_tpot = _recent_mean(
        answers.later_tokens, old.later_tokens, to_seconds(answers.decode_time), to_seconds(old.decode_time)
    )
    return _Rates(tokens_s, ttft_s, has_ttft, tpot_s, has_tpot)


def _recent_mean(count: int, old_count: int, total_s: float, old_total_s: float) -> tuple[float | None, bool]:
    """Mean of the newest values, and True; without new ones the mean of all values, None without any, and False."""
    if count > old_count:
        return (total_s - old_total_s) / (count - old_count), True
    return (total_s / count if count else None), False


def _request_key(request: apb.InFlightRequest) -> str:
    # No control character is in either part (`shown` in the router escapes them).
    return f"{request.tenant}\n{request.request_id}"


def _waiting(worker: apb.Worker) -> int:
    return worker.queued + worker.waiting_seqs


def _kv_use(worker: apb.Worker) -> float | None:
    return 1 - worker.free_blocks / worker.total_blocks if worker.total_blocks else None


def _progress(request: apb.InFlightRequest) -> str:
    return apb.RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower()


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _mean(seconds: float | None, is_recent: bool) -> str:
    text = _time(seconds)
    return text if is_recent or seconds is None else f"({text})"


def _short(number: float | None) -> str:
    """A number in at most five characters, up to 999 G."""
    if number is None:
        return "-"
    for unit in ("", "k", "M", "G"):
        if number < 999.5 or unit == "G":
            break
        number /= 1000
    return f"{number:.1f}{unit}" if unit and number < 99.95 else f"{number:.0f}{unit}"


def _time(seconds: float | None) -> str:
    """A time in at most five characters, up to 9,999 days."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f}ms" if seconds < 0.00995 else f"{seconds * 1e3:.0f}ms"
    for unit, size, most in (("s", 1.0, 99.95), ("m", 60.0, 5_997.0), ("h", 3600.0, 359_820.0)):
        if seconds < most:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds / 86_400:.0f}d"


def _padded(text: str, width: int, *, is_left: bool) -> str:
    cut = _cut(text, width)
    blanks = " " * (width - get_cwidth(cut))
    return cut + blanks if is_left else blanks + cut


def _cut(text: str, width: int) -> str:
    """The text, cut to `width` columns; a dot at the end marks the cut."""
    if get_cwidth(text) <= width:
        return text
    while get_cwidth(text) >= width and text:
        text = text[:-1]
    return text + "…" if width > 0 else ""
