"""CPU shares of service, client and others, from fake /proc tables and the real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.cli.bench.figures import NO_SHARES, CpuShares
from common.cli.bench.machine import (
    CpuMeter,
    CpuTime,
    Process,
    cpu_model,
    listening_process,
    meter_for,
    read_machine,
    read_process,
    trees,
)

CPUS = os.cpu_count() or 1
HZ = os.sysconf("SC_CLK_TCK")
LINUX = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc")


def test_lines_of_proc_are_read() -> None:
    line = "42 (a) b (c) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 3 4 20 0 1 0 555 1000 10"
    assert read_process(line) == Process(7, 127)
    machine = "cpu  10 20 30 1000 2000 3 4 50 60 70\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert read_machine(machine) == (67, 50)


def test_descendants_belong_to_a_tree() -> None:
    processes = {1: Process(0, 0), 2: Process(1, 0), 3: Process(2, 0), 4: Process(1, 0), 5: Process(4, 0)}
    assert trees(processes, [2]) == {2, 3}
    assert trees(processes, [2, 5, 99]) == {2, 3, 5}
    assert trees(processes, []) == set()


def test_shares_are_of_all_cores() -> None:
    whole = 10 * HZ * CPUS
    before, after = (
        CpuTime(100, 7, 10, 20),
        CpuTime(100 + whole // 2, 7 + whole // 10, 10 + whole // 4, 20 + whole // 8),
    )
    exact = {"client": 1 / 4, "service": 1 / 8, "foreign": 1 / 8, "steal": 1 / 10}
    shares = CpuMeter((1,), True).shares(before, after, 10.0)
    assert {name: getattr(shares, name) for name in exact} == pytest.approx(exact, abs=1e-3)
    remote = CpuMeter().shares(before, after, 10.0)
    assert remote.service is None
    assert remote.foreign == pytest.approx(1 / 8, abs=1e-3)
    unknown = CpuMeter(None, True).shares(before, after, 10.0)
    assert (unknown.service, unknown.foreign) == (None, None)
    assert unknown.client == pytest.approx(1 / 4, abs=1e-3)


def test_cpu_counters_read_apart_give_no_negative_share() -> None:
    assert CpuMeter().shares(CpuTime(0, 0, 0, 0), CpuTime(9, 0, 10, 0), 1.0).foreign == 0.0


def test_cpu_meter_without_proc_reads_no_values(tmp_path: Path) -> None:
    meter = CpuMeter(proc=tmp_path)
    assert meter.read() is None
    assert meter.shares(None, None, 1.0) == NO_SHARES == CpuShares()
    assert listening_process(1, tmp_path) is None
    assert cpu_model(tmp_path) == ""
    assert meter_for("127.0.0.1:1", proc=tmp_path).service is None


def write_process(proc: Path, pid: int, parent: int, ticks: int, *command: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (x) S {parent} 0 0 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 0 0 0")
    (folder / "cmdline").write_text("".join(word + "\0" for word in command))


@pytest.mark.parametrize(
    ("command", "root"),
    [
        (("/venv/bin/python", "/venv/bin/fissile", "serve", "--model", "m"), 10),
        (("python", "-m", "common.cli.main", "serve"), 10),
        (("bash", "-c", "fissile serve"), 11),
        (("python", "-m", "pytest", "serve"), 11),
    ],
)
def test_service_processes_are_listener_and_its_serve_group(
    tmp_path: Path, command: tuple[str, ...], root: int
) -> None:
    write_process(tmp_path, 10, 1, 0, *command)
    write_process(tmp_path, 11, 10, 0, "python", "-m", "router")
    (tmp_path / "11" / "fd").mkdir()
    (tmp_path / "11" / "fd" / "5").symlink_to("socket:[777]")
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rows = [("0100007F:C383", "0A", 777), ("0100007F:C383", "01", 778), ("0100007F:C384", "0A", 779)]
    lines = [f"   0: {at} 00000000:0000 {state} 0:0 00:0 0 0 0 {inode} 1\n" for at, state, inode in rows]
    (tmp_path / "net" / "tcp").write_text(head + "".join(lines))
    assert meter_for("127.0.0.1:50051", proc=tmp_path) == CpuMeter((root,), True, tmp_path)
    assert meter_for("localhost:50051", (9,), tmp_path).service == (9, root)
    assert meter_for("127.0.0.1:50053", proc=tmp_path).service is None
    assert meter_for("10.0.0.1:50051", proc=tmp_path) == CpuMeter((), False, tmp_path)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "[::1]"])
def test_address_without_port_has_only_named_processes(address: str, tmp_path: Path) -> None:
    assert meter_for(address, proc=tmp_path) == CpuMeter(None, True, tmp_path)
    assert meter_for(address, (9,), tmp_path) == CpuMeter((9,), True, tmp_path)


def test_cpu_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU  @ 2 GHz\nprocessor\t: 1\n")
    assert cpu_model(tmp_path) == "Some CPU  @ 2 GHz"


@LINUX
def test_process_listening_on_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening_process(server.getsockname()[1]) == os.getpid()


@LINUX
def test_cpu_meter_separates_client_and_service() -> None:
    """A child uses 0.2 s of CPU time, which counts as the service's if its pid is named, else as the client's."""
    program = (
        "from time import process_time\n"
        "input()\nbegin = process_time()\nwhile process_time() < begin + 0.2: pass\nprint(flush=True)\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        meters, begin = (CpuMeter(), CpuMeter((child.pid,), True)), time.monotonic()
        before = [meter.read() for meter in meters]
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after, seconds = [meter.read() for meter in meters], time.monotonic() - begin
        child.stdin.write(b"\n")
    own, named = (meter.shares(a, b, seconds) for meter, a, b in zip(meters, before, after, strict=True))
    assert own.client is not None
    assert named.client is not None
    assert named.service is not None
    assert own.client * seconds * CPUS > 0.1
    assert named.service * seconds * CPUS > 0.1
    assert named.client < own.client
    assert own.service is None
