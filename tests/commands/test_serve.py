"""`fitgpt serve`: the port, the address with its token, and an end that leaves nothing running."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fitgpt.commands.serve import listen, url_of
from fitgpt.config.command_options import ServeOptions
from fitgpt.core.errors import SystemFault, UsageError
from fitgpt.web.app import ServerAddress
from tests.web_server import serving

TIMEOUT = 30


def test_the_url_has_a_token_only_if_others_can_reach_it() -> None:
    assert url_of(ServerAddress(80)) == "http://127.0.0.1:80/"
    for host in ("0.0.0.0", "::"):
        assert url_of(ServerAddress(80, "secret", host)) == f"http://{socket.gethostname()}:80/?token=secret"
    assert url_of(ServerAddress(80, host="0:0::1")) == "http://[::1]:80/"


@pytest.mark.parametrize("host", ["example.com", "", "1.2.3", "0.0.0.0/0"])
def test_a_host_that_is_no_address_of_this_machine_is_an_error(host: str) -> None:
    with pytest.raises(UsageError, match="address of this machine"):
        ServeOptions(host=host)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has other loopback addresses than 127.0.0.1")
def test_another_loopback_address_is_printed_and_accepted_as_host(tmp_path: Path) -> None:
    with serving(tmp_path, "--host=127.0.0.2") as (address, _):
        found = re.fullmatch(r"http://127\.0\.0\.2:(\d+)/", address)
        assert found
        connection = http.client.HTTPConnection("127.0.0.2", int(found[1]), timeout=TIMEOUT)
        for host, status in ((f"127.0.0.2:{found[1]}", 200), (f"127.0.0.3:{found[1]}", 421)):
            connection.request("GET", "/", headers={"Host": host})
            reply = connection.getresponse()
            assert (reply.status, b"http://127.0.0.2" in reply.read()) == (status, status == 421)
        connection.close()


def test_a_port_in_use_is_reported_and_the_next_is_taken(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        number = taken.getsockname()[1]
        with serving(tmp_path, f"--port={number}") as (address, _):
            assert f":{number}/" not in address


def test_if_all_ports_are_in_use_the_error_has_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.commands.serve.PORTS_TRIED", 1)
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError) as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert "--port=0" in caught.value.fix
    with pytest.raises(SystemFault, match="Cannot listen"):
        listen("192.0.2.7", 0)


@pytest.mark.skipif(os.name != "posix", reason="signals and process groups")
@pytest.mark.parametrize(("ending", "computing"), [  # an idle server gets SIGINT at the end of the other tests
    ("SIGINT", True), ("SIGTERM", True), ("SIGKILL", True), ("SIGKILL", False)])
def test_the_end_of_the_server_ends_its_workers_and_prints_nothing(tmp_path: Path, ending: str,
                                                                   computing: bool) -> None:
    with serving(tmp_path) as (address, process):
        connection = http.client.HTTPConnection("127.0.0.1", int(address.rstrip("/").rpartition(":")[2]),
                                                timeout=TIMEOUT)
        connection.request("GET", "/api/plan?gpu=4070")  # the connection stays open, as a browser's does
        assert connection.getresponse().read()
        if computing:
            connection.request("GET", "/api/gpus?gpu=4070&n_layer=190&compile=False")
            time.sleep(0.2)
        workers = children(process.pid)
        assert len(workers) >= 2
        if ending == "SIGINT":
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers, too
        else:
            process.send_signal(getattr(signal, ending))
        printed, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == (-signal.SIGKILL if ending == "SIGKILL" else 0)
        if ending != "SIGKILL":
            assert printed.strip() in ("", "Ctrl-C stops it.")  # this line may have been read with the address
        connection.close()
        wait_until_ended(workers)


def test_ctrl_c_while_the_workers_start_prints_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, process):
        deadline = time.monotonic() + TIMEOUT
        while len(workers := children(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert printed.strip() in ("", "Ctrl-C stops it.")
        wait_until_ended(workers)


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, timeout=TIMEOUT)
    return [int(each) for each in found.stdout.split()]


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while pids and time.monotonic() < deadline:
        pids = [pid for pid in pids if is_running(pid)]
        time.sleep(0.02)
    assert pids == []


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, timeout=TIMEOUT)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")  # a zombie that init has not reaped yet


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(package: str) -> None:
    script = (f"import sys; sys.modules[{package!r}] = None\nfrom fitgpt.commands.main import main\n"
              "sys.exit(main(['serve', '--no-browser']))")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode == 2
    assert package in ended.stderr
    assert "[web]" in ended.stderr


def test_a_run_folder_that_does_not_exist_is_an_error_before_an_address_is_printed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-m", "fitgpt", "serve", "runs/nowhere", "--no-browser", "--port=0"],
                           capture_output=True, text=True, timeout=TIMEOUT, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "runs/nowhere does not exist" in ended.stderr
