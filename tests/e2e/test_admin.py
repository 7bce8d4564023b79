"""AdminService and its commands at a real router with two simulated workers."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from click.testing import CliRunner
from fissile.admin.v1 import admin_pb2 as apb
from fissile.admin.v1.admin_pb2_grpc import AdminServiceStub
from fissile.v1 import inference_pb2 as pb
from google.protobuf.field_mask_pb2 import FieldMask
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_status import rpc_status

from common.cli.core.errors import CommandError
from common.limits import MAX_LOAD_WATCHES
from common.rpc.durations import to_duration, to_seconds
from router.cli.cordon import cordon, drain, flush, uncordon
from router.cli.requests import requests
from router.cli.routing import reload, routing
from router.cli.workers import workers
from tests.e2e.service import Process, Service, free_port, generate, running_service
from tests.e2e.simulated import OPTIONS, outcome, request, simulated_model, wait_workers

CONFIG = "router:\n  placement: round_robin\n  tenant-weight: [gold=4]\n  queue-size: 77\n"


class Site:
    """A service with its administration."""

    def __init__(self, service: Service, channel: grpc.Channel, address: str, config: Path) -> None:
        self.service = service
        self.channel = channel
        self.address = address
        self.config = config

    @property
    def stub(self) -> AdminServiceStub:
        return AdminServiceStub(self.channel)

    def listed(self) -> dict[str, apb.Worker]:
        found = self.stub.ListWorkers(apb.ListWorkersRequest(), timeout=60).workers
        return {worker.worker_id: worker for worker in found}

    def states(self) -> dict[str, str]:
        return {name: apb.WorkerState.Name(w.state)[13:].lower() for name, w in self.listed().items()}

    def until(self, condition: Callable[[], object], within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"{self.states()}"
            time.sleep(0.02)

    def begun(self, *wanted: pb.GenerateRequest) -> list[Any]:
        """Calls that have got their first message."""
        calls = [self.service.stub.Generate(asked, timeout=60) for asked in wanted]
        for call in calls:
            next(iter(call))
        return calls

    def cancel(self, calls: Sequence[Any]) -> None:
        """Cancels calls, the only ones there are, and waits until nothing is left of them."""
        for call in calls:
            call.cancel()
        self.until(lambda: not sum(worker.running for worker in self.listed().values()))

    def run(self, command: click.Command, *arguments: str) -> str:
        """What a command prints; raises what it raises."""
        result = CliRunner().invoke(command, [*arguments, "--admin-address", self.address], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def site(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, port = tmp_path_factory.mktemp("admin"), free_port()
    config = folder / "fleet.yaml"
    config.write_text(CONFIG)
    # What finds no worker waits for as long as a busy machine may take for some commands.
    options = ["--admin-port", str(port), "--config", str(config), "--worker-wait", "60s"]
    with running_service(folder, model, workers=2, worker_options=OPTIONS, router_options=options) as service:
        wait_workers(service, 2)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Site(service, channel, f"127.0.0.1:{port}", config)


@pytest.fixture(autouse=True)
def as_it_was(site: Site) -> Iterator[None]:
    yield
    site.config.write_text(CONFIG)
    site.run(reload)
    site.until(lambda: site.states() == {"worker-0": "serving", "worker-1": "serving"})


def test_cordoned_worker_gets_no_new_work_and_finishes_running(site: Site) -> None:
    stub = site.service.stub
    with ThreadPoolExecutor(2) as pool:
        # Of each two, which go to both workers, one is long enough to be there when the worker is cordoned.
        long = site.begun(*(request(i, 1900) for i in range(2)))
        running = [pool.submit(generate, stub, request(i, 300)) for i in range(2, 4)]
        site.until(lambda: [w.running for w in site.listed().values()] == [2, 2] or all(f.done() for f in running))
        assert re.search("worker-0 is cordoned; [12] sequence", site.run(cordon, "worker-0"))
        site.until(lambda: site.states() == {"worker-0": "cordoned", "worker-1": "serving"})
        assert stub.GetModel(pb.GetModelRequest()).model.ready_workers == 1
        assert site.listed()["worker-0"].running >= 1
        finishes = [generate(stub, request(i)).finish for i in range(20, 26)]
        assert {finish.worker_id for finish in finishes if finish is not None} == {"worker-1"}
        answers = [future.result() for future in running]
        assert all(len(answer.token_ids) == 300 for answer in answers)
        # It was not moved: what ran there ends there.
        ended = [answer.finish for answer in answers if answer.finish is not None]
        assert sorted((finish.worker_id, finish.attempts) for finish in ended) == [("worker-0", 1), ("worker-1", 1)]
        site.cancel(long)
    assert "worker-0 takes work" in site.run(uncordon, "worker-0")
    site.until(lambda: site.states()["worker-0"] == "serving")
    finishes = [generate(stub, request(i)).finish for i in range(30, 34)]
    assert {finish.worker_id for finish in finishes if finish is not None} == {"worker-0", "worker-1"}


@pytest.mark.slow
def test_requests_of_evicted_worker_move_and_return(site: Site) -> None:
    stub = site.service.stub
    # Five seconds each, within which both workers are evicted, and one taken back.
    asked = [request(i, 1000) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        undisturbed = [answer.token_ids for answer in pool.map(partial(generate, stub), asked)]
        running = [pool.submit(generate, stub, one) for one in asked]
        site.until(lambda: [w.running for w in site.listed().values()] == [2, 2])
        site.run(cordon, "worker-1", "--evict")
        site.until(lambda: site.listed()["worker-1"].running == 0)
        site.run(cordon, "worker-0", "--evict")
        site.until(lambda: site.states() == {"worker-0": "cordoned", "worker-1": "cordoned"})
        # There is no other worker: what runs stays. When there is one again, it goes there.
        assert site.listed()["worker-0"].running == 4
        site.run(uncordon, "worker-1")
        site.until(lambda: site.listed()["worker-0"].running == 0)
        answers = [f.result() for f in running]
    assert [answer.token_ids for answer in answers] == undisturbed
    assert all(a.finish is not None and a.finish.exact for a in answers)
    site.run(uncordon, "worker-0")


def test_requests_without_model_name_show_chosen_model(site: Site) -> None:
    """A request without a model name gets the only model, and operators see its name."""
    calls = site.begun(request(0, 1900))
    try:
        (shown,) = json.loads(site.run(requests, "--json"))
        assert (shown["model"], shown["state"]) == ("test", "REQUEST_STATE_STREAMING")
    finally:
        site.cancel(calls)


def test_with_all_workers_cordoned_requests_wait(site: Site) -> None:
    for worker in ("worker-0", "worker-1"):
        site.run(cordon, worker)
    site.until(lambda: set(site.states().values()) == {"cordoned"})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcome, site.service.stub, 1, 8)
        load = next(iter(site.stub.WatchLoad(apb.WatchLoadRequest(count=1), timeout=60)))
        assert isinstance(load, apb.WatchLoadResponse)
        for worker in ("worker-0", "worker-1"):
            site.run(uncordon, worker)
        assert waiting.result() == (grpc.StatusCode.OK, 8)


def test_flushed_caches_are_empty_and_answers_stay(site: Site) -> None:
    stub, asked = site.service.stub, request(5)
    asked.token_ids.ids.extend(range(200))
    for _ in range(2):
        generate(stub, asked)
    warm = generate(stub, asked)
    assert warm.prompt_info is not None
    assert warm.prompt_info.cached_tokens > 150
    lines = [line.split() for line in site.run(flush).splitlines()]
    assert [line[0] for line in lines] == ["WORKER", "worker-0", "worker-1"]
    assert all(int(line[1]) >= 10 for line in lines[1:])
    cold = generate(stub, asked)
    assert cold.prompt_info is not None
    assert (cold.prompt_info.cached_tokens, cold.token_ids) == (0, warm.token_ids)
    (one,) = json.loads(site.run(flush, "worker-1", "--json"))
    assert (one["worker_id"], one["error"]) == ("worker-1", "")


def test_watch_load_ends_when_client_cancels(site: Site) -> None:
    running = site.begun(request(1, 1900))
    looks = site.run(workers, "--watch", "--interval", "0.2", "--count", "3", "--json").splitlines()
    site.cancel(running)
    loads = [json.loads(look) for look in looks]
    assert len(loads) == 3
    assert sum(worker["running"] for worker in loads[-1]["workers"]) == 1
    assert loads[-1]["in_flight"] == 1
    assert [queue["priority"] for queue in loads[0]["queues"]] == [
        "PRIORITY_HIGH",
        "PRIORITY_NORMAL",
        "PRIORITY_LOW",
    ]
    assert "waiting in the router: high 0, normal 0, low 0" in site.run(workers, "--watch", "--count", "1")
    call = site.stub.WatchLoad(apb.WatchLoadRequest(interval=to_duration(0.1)), timeout=60)
    next(iter(call))
    call.cancel()
    with pytest.raises(grpc.RpcError, match=r"interval is 0.099 s; valid: a duration of at least 0.1 s"):
        next(iter(site.stub.WatchLoad(apb.WatchLoadRequest(interval=to_duration(0.099)), timeout=60)))


def test_number_of_load_watchers_is_bounded(site: Site) -> None:
    calls = [site.stub.WatchLoad(apb.WatchLoadRequest(), timeout=60) for _ in range(MAX_LOAD_WATCHES)]
    for call in calls:
        next(iter(call))
    with pytest.raises(grpc.RpcError, match=f"{MAX_LOAD_WATCHES} clients already watch the load, which is the limit"):
        next(iter(site.stub.WatchLoad(apb.WatchLoadRequest(), timeout=60)))
    for call in calls:
        call.cancel()

    def watches() -> bool:
        try:
            return len(list(site.stub.WatchLoad(apb.WatchLoadRequest(count=1), timeout=60))) == 1
        except grpc.RpcError:
            return False

    # Clients that have gone leave nothing behind.
    site.until(watches)


def test_routing_changes_at_once_and_as_a_whole(site: Site) -> None:
    before = site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60)
    assert (before.routing.placement, before.routing.queue_size) == ("round_robin", 77)
    assert dict(before.routing.tenant_weight) == {"gold": 4.0}
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(outcome, site.service.stub, i, 150) for i in range(4)]
        shown = site.run(
            routing, "placement=least_loaded", "delay-factor=0.5", "tenant-weight=gold=2,trial=0.5", "max-hold=20ms",
            "tenant-concurrency=9", "tenant-max-priority=normal,gold=high",
        )  # fmt: skip
        running += [pool.submit(outcome, site.service.stub, i, 50) for i in range(4, 8)]
        assert {f.result()[0] for f in running} == {grpc.StatusCode.OK}
    assert dict(line.split() for line in shown.splitlines()) == {
        "placement": "least_loaded",
        "delay-factor": "0.5",
        "max-hold": "20ms",
        "queue-size": "77",
        "tenant-weight": "gold=2,trial=0.5",
        "tenant-concurrency": "9",
        "tenant-max-priority": "normal,gold=high",
        "version": str(before.version + 1),
    }
    # A mask can set what a message cannot say: zero, and an empty map.
    cleared = apb.SetRoutingRequest(update_mask=FieldMask(paths=["delay_factor", "tenant_weight"]))
    after = site.stub.SetRouting(cleared, timeout=60)
    assert (after.routing.delay_factor, dict(after.routing.tenant_weight)) == (0.0, {})
    assert to_seconds(after.routing.max_hold) == 0.02
    assert json.loads(site.run(routing, "--json"))["version"] == after.version


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"routing": {"placement": "best", "queue_size": 5}}, "routing.placement is best; valid: one of"),
        ({"routing": {"delay_factor": -1}}, "routing.delay_factor is -1"),
        ({"routing": {"tenant_max_priority": {"": "top"}}}, r"routing.tenant_max_priority\[''\] is top"),
        (
            {"update_mask": FieldMask(paths=["color"])},
            "update_mask names 'color'; valid: fields of Routing: delay_factor",
        ),
        ({}, "routing has no field"),
        ({"routing": {"queue_size": 5}, "if_version": 999}, "not 999; read it again"),
    ],
)
def test_invalid_configuration_change_is_ignored(site: Site, wanted: dict[str, object], message: str) -> None:
    before = site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60)
    with pytest.raises(grpc.RpcError, match=message):
        site.stub.SetRouting(apb.SetRoutingRequest(**wanted), timeout=60)  # type: ignore[arg-type]
    assert site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60) == before


def test_changed_tenant_limit_applies_at_once(site: Site) -> None:
    def ask(i: int) -> grpc.StatusCode:
        return outcome(site.service.stub, i, 8)[0]

    running = site.begun(request(0, 1900))
    site.run(routing, "tenant-concurrency=2")
    running += site.begun(request(1, 1900))
    assert {ask(i) for i in (2, 3)} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    site.run(routing, "tenant-concurrency=")
    assert {ask(i) for i in (2, 3)} == {grpc.StatusCode.OK}
    site.cancel(running)


@pytest.mark.parametrize("command", [cordon, uncordon, drain, flush])
def test_unknown_worker_error_lists_known_workers(site: Site, command: click.Command) -> None:
    with pytest.raises(CommandError, match="no worker is called 'w9'; workers: worker-0, worker-1") as caught:
        site.run(command, "w9")
    assert caught.value.exit_code == 2


def test_unreachable_address_error_says_how_to_start_service() -> None:
    for command, arguments in ((workers, ()), (workers, ("--watch",)), (routing, ()), (cordon, ("w",))):
        with pytest.raises(CommandError, match="AdminService needs `fissile router --admin-port`"):
            CliRunner().invoke(
                command, [*arguments, "--admin-address", f"127.0.0.1:{free_port()}"], catch_exceptions=False
            )


def test_channelz_is_served(site: Site) -> None:
    stub = channelz_pb2_grpc.ChannelzStub(site.channel)
    servers = stub.GetServers(channelz_pb2.GetServersRequest(), timeout=60).server
    assert sum(server.data.calls_started for server in servers) > 0


def test_refused_routing_change_names_field(site: Site) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        site.stub.SetRouting(apb.SetRoutingRequest(routing=apb.Routing(placement="best")), timeout=60)
    assert isinstance(caught.value, grpc.Call)
    status = rpc_status.from_call(caught.value)
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    assert bad.field_violations[0].field == "routing.placement"


def test_reload_applies_whole_file_or_nothing(site: Site) -> None:
    """Reload and SIGHUP change what may change; a bad file changes nothing; settings that need a restart are named."""
    before = site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60)
    site.config.write_text(
        "router:\n  placement: least_loaded\n  queue-size: 5\n  lease: 2s\n  isolate-tenants: true\n"
    )
    done = site.stub.Reload(apb.ReloadRequest(), timeout=60)
    assert sorted(done.changed) == ["placement", "queue-size", "tenant-weight"]
    assert (sorted(done.needs_restart), done.version) == (["isolate-tenants", "lease"], before.version + 1)
    after = site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60)
    assert (after.routing.placement, after.routing.queue_size, after.version) == ("least_loaded", 5, done.version)

    for text, message in (
        ("router:\n  placement: round_robin\n  queue-size: none\n", "line 3: router.queue-size: 'none' is not a valid"),
        ("router:\n  placement: round_robin\n\n  colour: red\n", "line 4: router.colour is not an option"),
        ("router:\n  delay-factor: .inf\n", "routing.delay_factor is inf"),
        ("router: [\n", "is not YAML"),
    ):
        site.config.write_text(text)
        with pytest.raises(CommandError, match=f"nothing has changed: .*{message}"):
            site.run(reload)
        assert site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60) == after

    site.config.write_text("router:\n  placement: session\n")
    site.service.router.running.send_signal(signal.SIGHUP)
    site.until(lambda: site.stub.GetRouting(apb.GetRoutingRequest(), timeout=60).routing.placement == "session")
    assert outcome(site.service.stub, 1, 8) == (grpc.StatusCode.OK, 8)
    site.config.write_text("router:\n  queue-size: none\n")
    site.service.router.running.send_signal(signal.SIGHUP)
    site.until(lambda: "configuration not reloaded" in site.service.router.log.read_text())


def test_reload_names_reverted_settings(site: Site) -> None:
    """Reload, its command and SIGHUP name the settings in the answer and in a warning."""

    def warnings() -> list[str]:
        lines = site.service.router.log.read_text().splitlines()
        return [line for line in lines if "settings of SetRouting replaced" in line]

    def change() -> None:
        site.run(routing, "placement=least_loaded", "tenant-weight=gold=2")

    before = len(warnings())
    change()
    done = site.stub.Reload(apb.ReloadRequest(), timeout=60)
    assert list(done.undone) == ["placement", "tenant-weight"]
    assert list(site.stub.Reload(apb.ReloadRequest(), timeout=60).undone) == []
    change()
    assert "undone, because `fissile routing` had set it: placement, tenant-weight" in site.run(reload)
    change()
    site.service.router.running.send_signal(signal.SIGHUP)
    site.until(lambda: len(warnings()) == before + 3)
    for line in warnings()[before:]:
        assert "warning" in line
        assert "placement" in line
        assert "tenant-weight" in line


def test_changed_worker_file_drops_and_adds_workers(model: Path, tmp_path: Path) -> None:
    """A worker that the file no longer names is dropped; one that cannot be reached is listed with the reason."""
    port = free_port()
    with running_service(tmp_path, model, workers=2, worker_options=OPTIONS) as service:
        config, (first, second) = tmp_path / "c.yaml", [worker.address for worker in service.workers]
        config.write_text(f"router:\n  worker: [{first}]\n")
        arguments = ["router", "--port", str(free_port()), "--admin-port", str(port), "--config", str(config)]
        router = Process("other", arguments, int(arguments[2]), tmp_path / "other.log")
        router.start()
        try:
            router.wait_serving()
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                site = Site(service, channel, f"127.0.0.1:{port}", config)
                nobody = f"127.0.0.1:{free_port()}"
                config.write_text(f"router:\n  worker: [{second}, {nobody}]\n  log-level: debug\n")
                assert "changed: worker, log-level" in site.run(reload)
                site.until(lambda: site.states() == {"worker-1": "serving", "": "unconnected"})
                site.until(lambda: "refused" in site.listed()[""].last_error)
                assert f"{nobody}: UNAVAILABLE" in site.run(workers)
        finally:
            router.stop(signal.SIGKILL)
