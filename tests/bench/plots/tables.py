"""Tables of docs/reference/performance.md, as Markdown, with figures as the results' files write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase
from typing import Final

from tests.bench.plots import results as data
from tests.bench.plots.charts import CONCURRENCIES, KINDS, STYLES, limits, limits_run, newest
from tests.bench.plots.results import Label, Result, Row

_ENGINES: Final = {key: style.label for key, style in STYLES.items() if key != "limit"}
Table = Callable[[Sequence[Result]], str]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of figures. Several metrics share a cell; figures in another unit than `unit` show theirs."""

    header: str
    metrics: tuple[str, ...]
    unit: str

    def cell(self, rows: Sequence[Row]) -> str:
        """The figures of `rows` for this column, repetitions in order; empty without any."""
        parts = [", ".join(self._text(row) for row in rows if row.metric == metric) for metric in self.metrics]
        return " / ".join(part for part in parts if part)

    def _text(self, row: Row) -> str:
        return row.text if row.unit == self.unit else f"{row.text} {row.unit}"


@dataclass(frozen=True, slots=True)
class Spec:
    """A table with a line for each combination of labels.

    Attributes:
        bench: whose newest run with such rows is shown.
        keys: labels and what stands above them; rows have these and no others.
        columns: of figures.
        kind: of machines, any if None.
        origin: False if the table before it has said where the figures come from.
    """

    bench: str
    keys: Mapping[str, str]
    columns: Sequence[Column]
    kind: str | None = None
    origin: bool = True

    def text(self, results: Sequence[Result]) -> str:
        """The newest run's figures, and the machine and workload of the run."""
        run = next(run for run in data.of(results, self.bench, self.kind) if self._rows(run))
        groups: dict[tuple[Label, ...], list[Row]] = {}
        for row in self._rows(run):
            groups.setdefault(tuple(row.labels[key] for key in self.keys), []).append(row)
        lines = [[*map(_label, group), *(c.cell(rows) for c in self.columns)] for group, rows in groups.items()]
        head = [*self.keys.values(), *(column.header for column in self.columns)]
        table = markdown(head, lines)
        return f"{caption(run)}\n\n{table}" if self.origin else table

    def _rows(self, run: Result) -> list[Row]:
        metrics = {metric for column in self.columns for metric in column.metrics}
        return [row for row in run.rows if row.metric in metrics and row.labels.keys() == self.keys.keys()]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; cells that are empty stay so."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def caption(run: Result) -> str:
    """Where a run's figures come from: date, commit, machine, command, and what else there is to say."""
    processor = run.machine.processor or "a processor that was not recorded"
    return f"{_origin(run)}; {run.machine.cores} cores, {processor}. {run.about}"


def _origin(run: Result) -> str:
    commit = f"commit {run.commit}" if run.commit else "commit not recorded"
    command = f"`{run.command}`" if run.command else "command not recorded"
    return f"{run.date.replace('T', ' ')}, {commit}, {command}"


def _label(value: Label) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


SERVICE_COLUMNS: Final = (
    Column("tokens/s", ("output_tokens_per_s",), "tokens/s"),
    Column("TTFT p50 / p99, ms", ("ttft_p50", "ttft_p99"), "ms"),
    Column("TPOT p50 / p99, ms", ("tpot_p50", "tpot_p99"), "ms"),
    Column("% of the limit", ("of_bound",), "%"),
)


def service(kind: str, results: Sequence[Result]) -> str:
    """All engines on a kind of processor: the newest run, then older results that it lacks, beside Fissile then."""
    runs = data.of(results, "peers", kind)
    shown: dict[tuple[int, str], None] = {}
    lines: list[tuple[int, list[str]]] = []
    sources: list[Result] = []
    for run in runs:
        chosen = list(_chosen(run, shown))
        if chosen:
            sources.append(run)
            shown.update(dict.fromkeys(chosen))
            lines += [(key[0], _service_line(run, *key, ascii_lowercase[len(sources) - 1])) for key in chosen]
    head = ["in flight", "engine", *(column.header for column in SERVICE_COLUMNS), "rows", "run"]
    notes = [f"- Run {ascii_lowercase[i]}: {_origin(run)}. {run.about}{_rates(run)}" for i, run in enumerate(sources)]
    ordered = [line for _, line in sorted(lines, key=lambda item: item[0])]
    machine = f"{runs[0].machine.cores} cores, {runs[0].machine.processor}. {_limit_note(results, kind)}"
    return "\n\n".join([machine, markdown(head, ordered), "\n".join(notes)])


def _chosen(run: Result, shown: Mapping[tuple[int, str], None]) -> Iterator[tuple[int, str]]:
    """Concurrency and peer of a run's shown rows: all new ones, and Fissile beside other engines with new ones."""
    found = [(int(row.labels["concurrency"]), str(row.labels["peer"])) for row in run.find("output_tokens_per_s")]
    fresh = {key for key in found if key not in shown}
    beside = {concurrency for concurrency, _ in fresh}
    for key in dict.fromkeys(found):
        if key in fresh or (key[1] == "fissile" and key[0] in beside):
            yield key


def _service_line(run: Result, concurrency: int, peer: str, letter: str) -> list[str]:
    rows = [row for row in run.rows if row.labels == {"concurrency": concurrency, "peer": peer}]
    first = rows[0]
    count = "0" if not first.counts else first.repetitions or max((row.repetition or 0 for row in rows), default=0)
    name = _ENGINES[peer]
    cells = [name, *(column.cell(rows) for column in SERVICE_COLUMNS)]
    marked = cells if first.counts else [f"({cell})" if cell else "" for cell in cells]
    return [str(concurrency), *marked, str(count or "2 or 3"), letter]


def _rates(run: Result) -> str:
    rates = [f"{row.text} {row.unit}" for name in ("memory_read", "arithmetic") for row in run.find(name)]
    return f" Limits at its beginning: {', '.join(rates)}." if len(rates) == 2 else ""


def _limit_note(results: Sequence[Result], kind: str) -> str:
    run = limits_run(results, kind)
    machine = limits(run)
    rates = f"{machine.read / 1e9:,.1f} GB/s and {machine.flops / 1e9:,.0f} GFLOP/s"
    return f"The limit in the plots is that of {rates}, as on {run.date[:10]} in a run of `{run.bench}`."


def ratios(kind: str, results: Sequence[Result]) -> str:
    """Fissile against vLLM, repetition by repetition, in the newest run that has it."""
    run = next(run for run in data.of(results, "peers", kind) if run.find("tokens_per_s_ratio"))
    names = {"fissile": "Fissile", "fissile-offline": "the engine alone"}
    lines = []
    for peer, concurrency in ((p, c) for p in names for c in CONCURRENCIES):
        rows = [row for row in run.rows if row.fits(row.metric, {"peer": peer, "concurrency": concurrency})]
        cells = [Column("", (metric,), "ratio").cell(rows) for metric in ("tokens_per_s_ratio", "ttft_p50_ratio")]
        if any(cells):
            lines.append([str(concurrency), names[peer], *cells])
    return markdown(["in flight", "against vLLM", "times its tokens/s", "times its TTFT p50"], lines)


def overview(results: Sequence[Result]) -> str:
    """Tokens per second of the engines that matter most, by kind of processor; prefill operations per second."""
    shown = ("fissile", "fissile-int8", "vllm", "llamacpp-bf16", "llamacpp-q8", "transformers")
    lines = [
        [
            KINDS[kind],
            *(_by_concurrency(data.of(results, "peers", kind), peer) for peer in shown),
            _prefill(results, kind),
        ]
        for kind in KINDS
    ]
    return markdown(["processor", *(_ENGINES[peer] for peer in shown), "prefill of 512, TFLOP/s"], lines)


def _by_concurrency(runs: Sequence[Result], peer: str) -> str:
    return " / ".join(_median_text(newest(runs, "output_tokens_per_s", peer, c)) for c in CONCURRENCIES)


def _median_text(rows: Sequence[Row]) -> str:
    value = data.median(rows)
    if value is None:
        return "–"
    return f"{value:.1f}" if all(row.counts for row in rows) else f"({value:.1f})"


def _prefill(results: Sequence[Result], kind: str) -> str:
    runs = data.of(results, "decode_step", kind)
    return next(row.text for run in runs for row in run.find("rate", step="prefill of 512"))


_STEP_COLUMNS: Final = (
    Column("median, ms", ("median",), "ms"),
    Column("best, ms", ("best",), "ms"),
    Column("floor, ms", ("floor",), "ms"),
    Column("% of the floor", ("of_floor",), "%"),
)


def steps(kind: str, results: Sequence[Result]) -> str:
    """A model's steps without a service, run by run, newest first."""
    runs = data.of(results, "decode_step", kind)
    tables = []
    for run in runs:
        columns = [c for c in _STEP_COLUMNS if any(run.find(metric) for metric in c.metrics)]
        names = dict.fromkeys(str(row.labels["step"]) for row in run.find("median"))
        lines = [
            [name, *(c.cell([r for r in run.rows if r.labels == {"step": name}]) for c in columns)] for name in names
        ]
        head = ["step", *(column.header for column in columns)]
        tables.append(f"{_origin(run)}. {run.about}{_rate_note(run)}\n\n{markdown(head, lines)}")
    return "\n\n".join(tables)


def _rate_note(run: Result) -> str:
    rates = [f" The prefill ran at {row.text} {row.unit}." for row in run.find("rate", step="prefill of 512")]
    products = [f"{row.labels['product']} at {row.text}" for row in run.find("product_rate")]
    return "".join(rates) + (f" While its products ran: {', '.join(products)} TFLOP/s." if products else "")


def _us(header: str, *metrics: str) -> Column:
    return Column(f"{header}, us", metrics, "us")


def _ms(header: str, *metrics: str) -> Column:
    return Column(f"{header}, ms", metrics, "ms")


_POLICY_KEYS: Final = {"concurrency": "in flight", "policy": "policy"}
_POLICY_COLUMNS: Final = (
    Column("tokens/s", ("output_tokens_per_s",), "tokens/s"),
    _ms("TTFT p50", "ttft_p50"),
    _ms("TPOT p50 / p99", "tpot_p50", "tpot_p99"),
)
_STREAM_KEYS: Final = {"server": "server", "step_ms": "step, ms", "streams": "streams"}
_ROUTER_CPU: Final = Column("server's CPU, us a token", ("router_cpu",), "us/token")
_SPECS: Final = {
    "backends": Spec(
        "backends",
        {"step": "step"},
        [
            _ms("PyTorch's operations", "torch"),
            _ms("native kernels", "cpu"),
            Column("times as fast", ("ratio",), "times"),
        ],
    ),
    "attention": Spec(
        "attention",
        {"step": "step"},
        [_ms("best", "best"), Column("rate", ("rate",), ""), Column("% of the limit", ("of_limit",), "%")],
    ),
    **{f"{kind}-policy": Spec("policy", _POLICY_KEYS, _POLICY_COLUMNS, kind) for kind in ("zen4", "zen5")},
    "amx-products": Spec(
        "linear", {"rows": "rows"}, [Column("median", ("median",), ""), Column("best", ("best",), "")], kind="amx"
    ),
    "zen5-products": Spec(
        "linear",
        {"rows": "rows"},
        [
            _ms("int8 before", "int8_before"),
            _ms("int8", "int8"),
            Column("of one row", ("int8_cost",), "times"),
            _ms("bfloat16 before", "bfloat16_before"),
            _ms("bfloat16", "bfloat16"),
            Column("of one row", ("bfloat16_cost",), "times"),
        ],
        kind="zen5",
    ),
    "peers-speculation": Spec(
        "peers.speculation",
        {"prompts": "prompts", "engine": "engine", "way": "way"},
        [
            Column("tokens/s", ("rate",), "tokens/s"),
            Column("drafts an answer", ("drafts",), "tokens"),
            Column("% right", ("right",), "%"),
        ],
    ),
    "attention-rows": Spec(
        "attention_rows",
        {"heads": "heads of", "context": "tokens", "threads": "threads", "rows": "rows"},
        [
            _us("a layer", "median"),
            Column("of one row", ("cost",), "times"),
            Column("of one row before", ("cost_before",), "times"),
            Column("times as fast as before", ("against",), "times"),
        ],
    ),
    "scheduler": Spec(
        "scheduler_cost", {"running": "running"}, [_us("median", "median"), _us("mean", "mean")], kind="avx2"
    ),
    "penalties": Spec("penalty_cost", {"tokens": "tokens of a row"}, [_ms("logits", "logits")]),
    "penalties-parts": Spec(
        "penalty_cost",
        {"tokens_per_row": "tokens of a row"},
        [_ms("batch", "batch"), _ms("counts", "counts"), _ms("logits", "logits"), _ms("logits, best", "logits_best")],
    ),
    "logit-digests": Spec(
        "digest_cost",
        {"rows": "rows", "digested": "rows digested"},
        [_ms("step, best", "step_best"), _ms("step, median", "step")],
    ),
    "speculation": Spec(
        "speculation",
        {"weights": "weights", "in_flight": "in flight", "right": "drafts that are right"},
        [
            Column("plain, tokens/s", ("plain",), "tokens/s"),
            Column("with drafts, tokens/s", ("drafting",), "tokens/s"),
            Column("times", ("times",), "times"),
        ],
    ),
    "speculation-cost": Spec(
        "speculation_cost",
        {"running": "running", "way": "measured"},
        [
            _us("without drafts", "plain"),
            _us("with drafts", "scheduling"),
            _us("a token of these", "a_token"),
            _us("mean of these", "with_blocks"),
            _us("before", "scheduling_before"),
            _us("choosing", "choosing"),
            _us("before", "choosing_before"),
            _us("proposing", "proposing"),
        ],
    ),
    "draft-cost": Spec(
        "draft_cost",
        {"at_once": "at once", "temperature": "temperature"},
        [
            _us("in one call", "one_call"),
            _us("by single operations", "single_operations"),
            Column("times", ("times",), "times"),
        ],
    ),
    "demo-drafts": Spec(
        "demo_drafts",
        {"where": "where", "temperature": "temperature", "at_once": "at once"},
        [
            Column("plain, tokens/s", ("plain",), "tokens/s"),
            Column("with drafts, tokens/s", ("drafting",), "tokens/s"),
            Column("times", ("times",), "times"),
            Column("rounds from / to", ("least", "most"), "times"),
        ],
    ),
    "constraints": Spec(
        "constraints",
        {"in_flight": "in flight", "constraint": "constraint"},
        [
            Column("tokens/s", ("rate",), "tokens/s"),
            Column("% fewer / standard error", ("fewer_wall", "error_wall"), "%"),
            Column("% fewer by CPU time / standard error", ("fewer_cpu", "error_cpu"), "%"),
            Column("CPU added to a constrained token, us / standard error", ("added", "error_added"), "us"),
        ],
    ),
    "constraint-profile": Spec(
        "constraint_profile",
        {"in_flight": "in flight", "part": "CPU time of"},
        [
            _us("without a constraint", "cpu_none"),
            _us("JSON Schema", "cpu_schema"),
            _us("its texts of at most 40 characters", "cpu_short"),
            _us("any JSON object", "cpu_any"),
        ],
    ),
    "json-schemas": Spec(
        "json_schemas",
        {"suite": "schemas of"},
        [
            Column("schemas", ("schemas",), "schemas"),
            Column("served", ("served",), "schemas"),
            _ms("checked in (p50 / p99 / most)", "check_p50", "check_p99", "check_most"),
            Column("invalid instances, in the grammar", ("invalid", "invalid_in"), "instances"),
            Column("valid instances, not in it", ("valid", "valid_out"), "instances"),
            Column("random answers, that finish, invalid of these", ("random", "finished", "wrong"), "answers"),
        ],
    ),
    "contract-cost": Spec(
        "router.contract_cost",
        {"in_flight": "in flight", "asked": "asked for"},
        [
            Column("wall time, of nothing", ("wall_of_nothing",), "ratio"),
            _us("CPU of the worker", "worker_cpu"),
            _us("added to it", "worker_added"),
            _us("CPU of the router", "router_cpu"),
            _us("added there", "router_added"),
        ],
    ),
    "collector": Spec(
        "collector",
        {"collector": "who collects"},
        [_ms("longest collection", "longest_collection"), Column("collections, ms a second", ("collections",), "ms/s")],
    ),
    "load": Spec(
        "load_checkpoint",
        {"loader": "loader", "dtype": "dtype"},
        [Column("peak, kept, MiB", ("peak_memory", "kept_memory"), "MiB"), Column("seconds", ("load",), "s")],
    ),
    "packed": Spec(
        "load_checkpoint",
        {"start": "start"},
        [
            Column("loaded after, s", ("loaded",), "s"),
            Column("first step done after, s", ("first_step",), "s"),
            Column("memory of each of two processes, MiB", ("memory_of_a_process",), "MiB"),
        ],
    ),
    "rank-frames": Spec(
        "rank_cost",
        {"sequences": "sequences", "context": "context"},
        [Column("bytes", ("frame",), "bytes"), _us("encode", "encode"), _us("decode", "decode")],
    ),
    "rank-steps": Spec(
        "rank_cost",
        {"sequences": "sequences", "ranks": "ranks"},
        [_ms("median", "median"), _ms("best", "best")],
        origin=False,
    ),
    "prefix": Spec(
        "router.prefix",
        {"policy": "policy"},
        [
            Column("prompt tokens saved, %", ("prompt_tokens_saved",), "%"),
            _ms("TTFT p50 / p99", "ttft_p50", "ttft_p99"),
            Column("fewest / most requests on a worker", ("fewest_requests", "most_requests"), "requests"),
        ],
    ),
    "prefix-routers": Spec(
        "router.prefix",
        {"policy": "policy", "routers": "routers"},
        [
            Column("prompt tokens saved, %", ("prompt_tokens_saved",), "%"),
            _ms("TTFT p50 / p99", "ttft_p50", "ttft_p99"),
        ],
    ),
    "decision": Spec(
        "router.decision", {"workers": "workers", "prompt": "prompt"}, [_us("p50 / p99", "placed_p50", "placed_p99")]
    ),
    "streams": Spec(
        "router.streams",
        _STREAM_KEYS,
        [
            Column("tokens/s", ("tokens_per_s",), "tokens/s"),
            Column("tokens a message", ("tokens_per_message",), "tokens"),
            _ROUTER_CPU,
            Column("worker's CPU, us a token", ("worker_cpu",), "us/token"),
            _ms("gap p50 / p99", "gap_p50", "gap_p99"),
        ],
        kind="avx2",
    ),
    "amx-streams": Spec("router.streams", _STREAM_KEYS, [_ROUTER_CPU], kind="amx"),
    "hop": Spec(
        "router.hop",
        {"load": "load", "way": "way"},
        [
            _ms("TTFT p50 / p99", "ttft_p50", "ttft_p99"),
            _ms("TPOT p50", "tpot_p50"),
            Column("router's CPU, us a token", ("router_cpu",), "us/token"),
            Column("worker's CPU, us a token", ("worker_cpu",), "us/token"),
        ],
    ),
    "peer": Spec(
        "router.peer",
        {"way": "way", "streams": "streams"},
        [
            Column("tokens/s", ("tokens_per_s",), "tokens/s"),
            _ms("TTFT p50 / p99", "ttft_p50", "ttft_p99"),
            _ms("gap p50 / p99", "gap_p50", "gap_p99"),
            Column("router's CPU, s per 1000 tokens", ("router_cpu",), "s per 1000 tokens"),
            Column("router's memory, MiB", ("router_memory",), "MiB"),
            Column("worker's CPU, s per 1000 tokens", ("worker_cpu",), "s per 1000 tokens"),
        ],
    ),
    "doors-cost": Spec(
        "doors",
        {"step": "step", "streams": "streams", "door": "through"},
        [
            Column("tokens/s", ("tokens_per_s",), "tokens/s"),
            Column("door's CPU, s per 1,000 tokens", ("door_cpu",), "s per 1000 tokens"),
            Column("worker's CPU, s per 1,000 tokens", ("worker_cpu",), "s per 1000 tokens"),
            _ms("TTFT p50", "ttft_p50"),
            _ms("added TTFT", "added_ttft"),
            Column("door's memory, MiB", ("door_memory",), "MiB"),
            Column("failed", ("failed",), "answers"),
            Column("other processes, % of the cores", ("others",), "%"),
        ],
    ),
    "doors-faults": Spec(
        "doors",
        {"fault": "fault", "door": "through", "seen": "what clients saw"},
        [Column(metric, (metric,), "answers") for metric in ("survived", "changed", "failed")],
        origin=False,
    ),
    "delay": Spec(
        "router.delay",
        {"routers": "routers", "delay_factor": "delay factor"},
        [
            Column("prefill batch", ("prefill_batch",), "requests"),
            Column("requests/s", ("requests_per_s",), "requests/s"),
            _ms("TTFT p50 / p99", "ttft_p50", "ttft_p99"),
            _ms("TPOT p50 / p99", "tpot_p50", "tpot_p99"),
        ],
    ),
    "loop-lag": Spec(
        "router.loop_lag",
        {"beside": "beside the streams"},
        [
            _ms("lag p50 / p99 / p99.9", "lag_p50", "lag_p99", "lag_p999"),
            _ms("idle router's p50 / p99", "idle_p50", "idle_p99"),
            Column("prompt tokens/s", ("prompt_tokens_per_s",), "tokens/s"),
            _ms("prompts' TTFT p50", "prompt_ttft_p50"),
            Column("streams' tokens/s", ("stream_tokens_per_s",), "tokens/s"),
            Column("router's CPU, % of a core", ("router_cpu",), "% of a core"),
        ],
    ),
    "shares": Spec(
        "router.shares",
        {"a_asks": "A asks, a second"},
        [
            Column("A served, refused, dropped, a second", ("a_served", "a_refused", "a_dropped"), "requests/s"),
            Column("B served, a second", ("b_served",), "requests/s"),
            Column("B refused", ("b_refused",), "requests"),
            _ms("B's longest wait", "b_longest_wait"),
        ],
    ),
    "shares-of-work": Spec(
        "router.shares",
        {"each": "each request"},
        [
            Column("requests", ("requests",), "requests"),
            Column("prompt tokens", ("prompt_tokens",), "tokens"),
            Column("output tokens", ("output_tokens",), "tokens"),
            Column("work, millions", ("work",), "million tokens"),
        ],
        origin=False,
    ),
    "stalls": Spec(
        "router.stalls",
        {"workers": "workers", "waiting": "waiting"},
        [_ms("a worker drains", "drains"), _ms("goes", "goes"), _ms("comes", "comes")],
    ),
    "beside": Spec(
        "router.beside",
        {"load": "load", "statistic": "statistic", "build": "build"},
        [Column("router's CPU", ("router_cpu",), ""), Column("more than at 60ba5bf", ("router_cpu_difference",), "")],
    ),
}
TABLES: Final[Mapping[str, Table]] = {
    "overview": overview,
    **{f"{kind}-service": partial(service, kind) for kind in KINDS},
    **{f"{kind}-ratios": partial(ratios, kind) for kind in KINDS if kind != "avx2"},
    **{f"{kind}-steps": partial(steps, kind) for kind in KINDS},
    **{name: spec.text for name, spec in _SPECS.items()},
}
