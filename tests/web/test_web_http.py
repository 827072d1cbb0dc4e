"""Whom the server answers, what it refuses, and that nobody can keep it from answering others."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fitgpt.commands.serve import address_of, listen
from fitgpt.config.command_options import ServeOptions
from fitgpt.core.errors import SystemFault, UsageError
from fitgpt.web.app import LARGEST_BODY, make_app
from fitgpt.web.guard import Door
from fitgpt.web.lanes import Lanes
from fitgpt.web.serving import make_server
from web_server import NOTES, run_going_on, serving

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("served")
    with run_going_on(folder), serving(folder) as (address, _):
        yield int(address.rstrip("/").rpartition(":")[2])


def get(port: int, path: str, body: bytes | None = None, method: str = "", **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, body, told)
        reply = connection.getresponse()
        return Reply(reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(65536)


# ---- who is answered


def test_the_page_its_files_and_its_questions_are_answered(port: int) -> None:
    page = get(port, "/")
    assert page.status == 200
    named = set(re.findall(rb'"(/static/[\w.]+)"', page.body))
    assert len(named) >= 6
    for name in named:
        assert get(port, name.decode()).status == 200, name
    assert get(port, "/api/plan?gpu=4070").json["fits"] is True
    assert get(port, "/api/live").json["run"]["folder"] == "runs/fineweb"


def test_every_answer_forbids_the_browser_all_that_is_not_needed(port: int) -> None:
    for path in ("/", "/static/main.js", "/api/plan?gpu=4070", "/nowhere"):
        headers = get(port, path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert not [name for name in headers if name.startswith("access-control") or name == "server"]
    page = get(port, "/").body
    assert not re.search(rb"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=|https?://", page)


@pytest.mark.parametrize("host", [
    "evil.example", "127.0.0.1.evil.example:{port}", "localhost:9", "127.0.0.1", "[::1]:1", "x/y?:{port}", "{port}",
    "127.0.0.1:{port}:{port}", "127.0.0.1:{port}@evil.example", "127.0.0.1:{port}, evil.example", ""])
def test_a_request_for_another_host_is_refused(port: int, host: str) -> None:
    assert get(port, "/api/plan", Host=host.format(port=port)).status in (400, 421)


@pytest.mark.parametrize("head", ["", "Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n"])
def test_a_request_with_no_host_or_with_two_is_refused(port: int, head: str) -> None:
    assert b" 400 " in raw(port, f"GET / HTTP/1.1\r\n{head.format(port=port)}\r\n".encode()).split(b"\r\n")[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_this_machines_own_names_are_taken(port: int, host: str) -> None:
    assert get(port, "/", Host=f"{host}:{port}").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1",
                                    "http://localhost:{port}"])
def test_another_sites_page_is_refused(port: int, origin: str) -> None:
    origin = origin.format(port=port)
    assert get(port, "/api/plan?gpu=4070", Origin=origin).status == 403
    assert get(port, "/api/explain", b"{}", Origin=origin, Content_Type="application/json").status == 403
    assert get(port, "/api/plan", method="OPTIONS", Origin=origin).status == 403


def test_our_own_page_is_not_and_neither_is_a_link_to_it(port: int) -> None:
    own = f"http://127.0.0.1:{port}"
    assert get(port, "/api/plan?gpu=4070", Origin=own, Sec_Fetch_Site="same-origin").status == 200
    assert get(port, "/", Sec_Fetch_Site="cross-site").status == 200
    assert get(port, "/api/plan?gpu=4070", Sec_Fetch_Site="cross-site").status == 403


# ---- what is refused


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/index.html", "/static/",
                                  "/static//etc/passwd", "/api/", "/api/nothing", "/api/explain%00", "/x"])
def test_nothing_else_is_there(port: int, path: str) -> None:
    assert get(port, path).status in (404, 405)


def test_only_the_method_that_is_meant_works(port: int) -> None:
    assert get(port, "/api/plan", b"").status == 405
    assert get(port, "/api/explain").status == 405
    assert get(port, "/", method="DELETE").status == 405


def explain(port: int, body: bytes, kind: str = "application/json", **headers: str) -> Reply:
    return get(port, "/api/explain", body, Content_Type=kind, **headers)


@pytest.mark.parametrize(("body", "status"), [
    (b"{", 400), (b"[]", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b"{}", 400),
    (b'{"text": 5, "query": null}', 400), (b'{"text": "", "query": 5}', 400), (b'{"text": "", "query": null}', 200),
    (b'{"text": "\\ud800", "query": null}', 200), (b'{"text": "", "query": "n_layer=0"}', 200)])
def test_a_body_that_is_no_question_is_refused(port: int, body: bytes, status: int) -> None:
    assert explain(port, body).status == status


def test_a_form_of_another_site_cannot_pass_for_json(port: int) -> None:
    assert explain(port, b'{"text": "", "query": null}', "text/plain").status == 415


def test_a_large_body_is_refused_by_its_claim_and_by_its_size(port: int) -> None:
    assert explain(port, b"x" * (LARGEST_BODY + 1)).status == 413
    claim = (f"POST /api/explain HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
             f"Content-Length: {2**40}\r\n\r\n")
    assert b" 413 " in raw(port, claim.encode())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/api/explain", (b"x" * 65536 for _ in range(16)), {"Content-Type": "application/json"},
                       encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_long_address_is_refused(port: int) -> None:
    assert get(port, f"/api/plan?gpu={'x' * 10_000}").status == 414
    assert get(port, f"/api/plan?gpu={'x' * 100_000}").status in (400, 414)


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "\" onload=\"x", "%1b[31m", "\u202e", "${1+1}", "'--"])
def test_hostile_words_come_back_as_json_and_nothing_else(port: int, text: str) -> None:
    from urllib.parse import quote

    for knob in ("gpu", "others", "recompute", "anything"):
        reply = get(port, f"/api/plan?gpu=4070&{knob}={quote(text)}")
        assert reply.headers["content-type"] == "application/json"
        assert reply.json["problem"]["what"] if knob != "anything" else reply.json["fits"]
    message = f"CUDA out of memory. Tried to allocate 20 MiB {text}"
    told = explain(port, json.dumps({"text": message, "query": None}).encode())
    assert told.json["title"]


# ---- in time


@pytest.mark.parametrize("query", ["gpu=4070", "gpu=4070&compile=False&n_layer=6", NOTES.replace("nanogpt", "fitgpt"),
                                   NOTES, "gpu=4070&trainer=nanogpt&n_layer=24&n_head=16&n_embd=1024",
                                   "gpu=4070&n_layer=24&n_head=16&n_embd=1024&compile=False",
                                   "gpu=h200&n_layer=48&n_head=25&n_embd=1600&batch_size=4",
                                   "gpu=h200&trainer=nanogpt&n_layer=48&n_head=25&n_embd=1600&batch_size=4",
                                   "gpu=h200&trainer=nanogpt&n_layer=36&n_head=20&n_embd=1280&compile=False&bias=True"])
def test_an_answer_comes_within_50_ms(port: int, query: str) -> None:
    """The best of several, each of another question: what is measured is the program, not who else uses the machine."""
    taken = []
    for number in range(40):
        began = time.perf_counter()
        assert "fits" in get(port, f"/api/plan?{query}&vocab_size={50_304 - 64 * number}").json
        taken.append(time.perf_counter() - began)
        if taken[-1] < 0.05:
            return
    raise AssertionError(f"the best took {1000 * min(taken):.0f} ms")


def test_a_body_does_not_wait_until_its_headers_are_acknowledged(port: int) -> None:
    """On a connection that is kept, as a browser's is; a client may take 40 ms to acknowledge."""
    connection, taken = http.client.HTTPConnection("127.0.0.1", port), []
    for _ in range(10):
        connection.request("GET", "/api/plan?gpu=4070")
        reply = connection.getresponse()
        began = time.perf_counter()
        assert reply.read()
        taken.append(time.perf_counter() - began)
    connection.close()
    assert sorted(taken)[len(taken) // 2] < 0.02


def test_clients_that_never_finish_do_not_keep_others_waiting(port: int) -> None:
    head = f"POST /api/explain HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n".encode()
    slow = []
    try:
        for number in range(400):  # more than are let in at once
            slow.append(socket.create_connection(("127.0.0.1", port)))
            slow[-1].sendall((b"GET / HT", head, head + b"Content-Length: 1000\r\n\r\n{")[number % 3])
        began = time.perf_counter()
        assert get(port, "/api/plan?gpu=4070").status == 200
        assert time.perf_counter() - began < 5
    finally:
        for each in slow:
            each.close()


def test_a_question_that_takes_long_does_not_stand_before_a_quick_one(port: int) -> None:
    long = "/api/cards?gpu=4070&n_layer=90&compile=False"
    asking = threading.Thread(target=lambda: get(port, long))
    asking.start()
    time.sleep(0.2)
    began = time.perf_counter()
    assert get(port, "/api/plan?gpu=4070").json["fits"] is True
    assert time.perf_counter() - began < 2
    assert asking.is_alive()
    asking.join()


def test_a_connection_on_which_nothing_is_completed_is_closed() -> None:
    listening = listen("127.0.0.1", 0)
    door = Door(listening.getsockname()[1])
    server = make_server(door, Lanes(5), connections=10, head=4096, patience=0.3)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n")
            try:
                closed = connection.recv(1000) == b""
            except ConnectionError:
                closed = True
            assert closed
    finally:
        server.should_exit = True
        thread.join()


# ---- the token


def through(door: Door, path: str, **headers: str) -> Reply:
    """A request straight to the application, without a network."""
    sent: list[dict[str, Any]] = []

    async def asked() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        told = {"host": "192.0.2.7:80"} | headers
        address, _, query = path.partition("?")
        scope = {"type": "http", "method": "GET", "path": address, "query_string": query.encode(), "scheme": "http",
                 "server": ("192.0.2.7", 80), "root_path": "", "http_version": "1.1",
                 "headers": [(key.encode(), value.encode()) for key, value in told.items()]}
        await make_app(door, Lanes(5))(scope, receive, send)

    asyncio.run(asked())
    found = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))


def test_whoever_comes_from_elsewhere_needs_the_token_and_only_once() -> None:
    door = Door(80, "right")
    assert through(door, "/").status == 401
    assert through(door, "/static/main.js?token=wrong").status == 401
    assert through(door, "/", cookie="fitgpt-80=wrong").status == 401
    assert through(door, "/", cookie='fitgpt-80="; x=\\').status == 401
    opened = through(door, "/?token=right&gpu=4070")
    assert opened.status == 303
    assert opened.headers["location"] == "/?gpu=4070"
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert through(door, "/", cookie=cookie.partition(";")[0]).status == 200
    assert through(door, "/", cookie=cookie.partition(";")[0], origin="http://evil.example").status == 403


def test_a_server_for_others_prints_its_token_and_one_for_this_machine_has_none() -> None:
    assert address_of(Door(80)) == "http://127.0.0.1:80/"
    for host in ("0.0.0.0", "::"):
        assert address_of(Door(80, "secret", host)) == f"http://{socket.gethostname()}:80/?token=secret"
    assert address_of(Door(80, host="0:0::1")) == "http://[::1]:80/"
    for host in ("example.com", "", "1.2.3", "0.0.0.0/0"):
        with pytest.raises(UsageError, match="address of this machine"):
            ServeOptions(host=host)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.1 is the only one of its kind")
def test_another_address_of_this_machine_is_the_one_that_is_named_and_taken(tmp_path: Path) -> None:
    with serving(tmp_path, "--host=127.0.0.2") as (address, _):
        there = re.fullmatch(r"http://127\.0\.0\.2:(\d+)/", address)
        assert there
        connection = http.client.HTTPConnection("127.0.0.2", int(there[1]), timeout=30)
        for host, status in ((f"127.0.0.2:{there[1]}", 200), (f"127.0.0.3:{there[1]}", 421)):
            connection.request("GET", "/", headers={"Host": host})
            reply = connection.getresponse()
            assert (reply.status, b"http://127.0.0.2" in reply.read()) == (status, status == 421)
        connection.close()


@pytest.mark.parametrize(("host", "status"), [("127.0.0.2:80", 200), ("localhost:80", 200), ("127.0.0.3:80", 421)])
def test_the_address_it_listens_on_is_among_its_own_names(host: str, status: int) -> None:
    assert through(Door(80, host="127.0.0.2"), "/", host=host).status == status


# ---- beginning and end


def test_a_taken_port_is_said_and_the_next_one_used(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        number = taken.getsockname()[1]
        with serving(tmp_path, f"--port={number}") as (address, process):
            assert f":{number}/" not in address
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


def test_where_all_ports_are_taken_a_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fitgpt.commands.serve.PORTS_TRIED", 1)
    with listen("127.0.0.1", 0) as taken, pytest.raises(UsageError) as caught:
        listen("127.0.0.1", taken.getsockname()[1])
    assert "--port=0" in caught.value.fix
    with pytest.raises(SystemFault, match="Cannot listen"):
        listen("192.0.2.7", 0)


def test_ctrl_c_ends_it_quietly_with_its_workers(tmp_path: Path) -> None:
    with serving(tmp_path) as (address, process):
        number = int(address.rstrip("/").rpartition(":")[2])
        waiting = http.client.HTTPConnection("127.0.0.1", number)
        waiting.request("GET", "/api/plan?gpu=4070")  # and stays open, as a browser's would
        assert waiting.getresponse().status == 200
        workers = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=10)
        assert process.returncode == 0
        assert said.strip() in ("", "Ctrl-C ends it.")  # the line may have been read with the address
        waiting.close()
        for pid in map(int, workers.stdout.split()):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_what_brings_it(package: str) -> None:
    script = (f"import sys; sys.modules[{package!r}] = None\nfrom fitgpt.commands.main import main\n"
              "sys.exit(main(['serve', '--no-browser']))")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 2
    assert package in ended.stderr
    assert "[web]" in ended.stderr


def test_what_answers_loads_neither_torch_nor_numpy() -> None:
    script = ("import sys, fitgpt.web.worker as w\n"
              "known = w.table()\n"
              "for ask in ('form', 'plan', 'step', 'exact', 'fixes', 'live'):\n"
              "    w.answered({'ask': ask, 'query': 'gpu=4070&n_layer=1'}, known)\n"
              "assert not {'torch', 'numpy', 'starlette', 'uvicorn'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
