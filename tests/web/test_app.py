"""Which HTTP requests are answered, and which status hostile ones get."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from fitgpt.web.api import ApiRequest
from fitgpt.web.app import MAX_BODY, ServerAddress, make_app
from fitgpt.web.workers import Busy, TooSlow, WorkerEnded
from tests.web_server import running_run, serving


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
    with running_run(folder), serving(folder) as (address, _):
        yield int(address.rstrip("/").rpartition(":")[2])


def get(port: int, path: str, body: bytes | None = None, method: str = "", **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        all_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method or ("GET" if body is None else "POST"), path, body, all_headers)
        reply = connection.getresponse()
        return Reply(reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read())
    finally:
        connection.close()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        return connection.recv(65536)


# ---- accepted


def test_page_files_and_api_are_served(port: int) -> None:
    page = get(port, "/")
    assert page.status == 200
    named = set(re.findall(rb'"(static/[\w.]+)"', page.body))
    assert len(named) >= 6
    for name in named:
        assert get(port, f"/{name.decode()}").status == 200, name
    assert get(port, "/api/plan?gpu=4070").json["verdict"] == "fits"
    assert get(port, "/api/live").json["run"]["folder"] == "runs/fineweb"


def test_every_response_has_security_headers(port: int) -> None:
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
def test_a_request_for_another_host_is_rejected(port: int, host: str) -> None:
    assert get(port, "/api/plan", Host=host.format(port=port)).status in (400, 421)


@pytest.mark.parametrize("head", ["", "Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n"])
def test_a_request_with_no_host_or_two_is_rejected(port: int, head: str) -> None:
    assert b" 400 " in raw(port, f"GET / HTTP/1.1\r\n{head.format(port=port)}\r\n".encode()).split(b"\r\n")[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_loopback_names_are_accepted(port: int, host: str) -> None:
    assert get(port, "/", Host=f"{host}:{port}").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1",
                                    "http://localhost:{port}"])
def test_a_page_of_another_site_is_rejected(port: int, origin: str) -> None:
    origin = origin.format(port=port)
    assert get(port, "/api/plan?gpu=4070", Origin=origin).status == 403
    assert get(port, "/api/paste", b"{}", Origin=origin, Content_Type="application/json").status == 403
    assert get(port, "/api/plan", method="OPTIONS", Origin=origin).status == 403


def test_the_page_itself_and_links_to_it_are_accepted(port: int) -> None:
    own = f"http://127.0.0.1:{port}"
    assert get(port, "/api/plan?gpu=4070", Origin=own, Sec_Fetch_Site="same-origin").status == 200
    assert get(port, "/", Sec_Fetch_Site="cross-site").status == 200
    assert get(port, "/api/plan?gpu=4070", Sec_Fetch_Site="cross-site").status == 403


# ---- rejected


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/index.html", "/static/",
                                  "/static//etc/passwd", "/api/", "/api/nothing", "/api/paste%00", "/x",
                                  "/docs/../README.md", "/docs/", "/static/strings/en.json"])
def test_other_paths_are_not_found(port: int, path: str) -> None:
    assert get(port, path).status in (404, 405)


def test_other_methods_are_not_allowed(port: int) -> None:
    assert get(port, "/api/plan", b"").status == 405
    assert get(port, "/api/paste").status == 405
    assert get(port, "/", method="DELETE").status == 405


def paste(port: int, body: bytes, kind: str = "application/json", **headers: str) -> Reply:
    return get(port, "/api/paste", body, Content_Type=kind, **headers)


@pytest.mark.parametrize(("body", "status"), [
    (b"{", 400), (b"[]", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b"{}", 400),
    (b'{"text": 5, "query": null}', 400), (b'{"text": "", "query": 5}', 400), (b'{"text": "", "query": null}', 200),
    (b'{"text": "\\ud800", "query": null}', 200), (b'{"text": "", "query": "n_layer=0"}', 200)])
def test_an_invalid_body_is_a_400(port: int, body: bytes, status: int) -> None:
    assert paste(port, body).status == status


def test_a_body_that_is_not_declared_as_json_is_a_415(port: int) -> None:
    assert paste(port, b'{"text": "", "query": null}', "text/plain").status == 415


def test_a_large_body_is_a_413_by_its_header_or_its_size(port: int) -> None:
    assert paste(port, b"x" * (MAX_BODY + 1)).status == 413
    request = (f"POST /api/paste HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
               f"Content-Length: {2**40}\r\n\r\n")
    assert b" 413 " in raw(port, request.encode())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/api/paste", (b"x" * 65536 for _ in range(16)), {"Content-Type": "application/json"},
                       encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_long_address_is_a_414(port: int) -> None:
    assert get(port, f"/api/plan?gpu={'x' * 10_000}").status == 414
    assert get(port, f"/api/plan?gpu={'x' * 100_000}").status in (400, 414)


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "\" onload=\"x", "%1b[31m", "\u202e", "${1+1}", "'--"])
def test_hostile_text_comes_back_only_as_json(port: int, text: str) -> None:
    for setting in ("gpu", "others", "saved_activations", "anything"):
        reply = get(port, f"/api/plan?gpu=4070&{setting}={quote(text)}")
        assert reply.headers["content-type"] == "application/json"
        assert reply.json["problem"]["what"] if setting != "anything" else reply.json["verdict"]
    message = f"CUDA out of memory. Tried to allocate 20 MiB {text}"
    found = paste(port, json.dumps({"text": message, "query": None}).encode())
    assert found.json["diagnosis"]["title"]


# ---- slow clients and slow answers


def test_400_clients_that_never_finish_do_not_block_others(port: int) -> None:
    head = f"POST /api/paste HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n".encode()
    slow = []
    try:
        for number in range(400):
            slow.append(socket.create_connection(("127.0.0.1", port), timeout=10))
            slow[-1].sendall((b"GET / HT", head, head + b"Content-Length: 1000\r\n\r\n{")[number % 3])
        assert get(port, "/api/plan?gpu=4070").status == 200
    finally:
        for each in slow:
            each.close()


@pytest.mark.parametrize(("error", "text"), [(Busy, "Too many requests"), (TooSlow, "took longer than 40 s"),
                                               (WorkerEnded, "computes the answers ended")])
def test_an_answer_that_cannot_be_computed_is_a_503_with_a_fix(error: type[Exception], text: str) -> None:
    reply = through(ServerAddress(80), "/api/plan", FailingPool(error), host="localhost:80")
    assert reply.status == 503
    assert text in reply.json["problem"]["what"]
    assert reply.json["problem"]["fix"]


class FailingPool:
    def __init__(self, error: type[Exception] = Busy) -> None:
        self.error = error

    async def answer(self, request: ApiRequest) -> bytes:
        raise self.error


# ---- the token


def through(address: ServerAddress, path: str, pool: Any = None, **headers: str) -> Reply:
    """A request straight to the application, without a network."""
    sent: list[dict[str, Any]] = []

    async def call() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        all_headers = {"host": "192.0.2.7:80"} | headers
        name, _, query = path.partition("?")
        scope = {"type": "http", "method": "GET", "path": name, "query_string": query.encode(), "scheme": "http",
                 "server": ("192.0.2.7", 80), "root_path": "", "http_version": "1.1",
                 "headers": [(key.encode(), value.encode()) for key, value in all_headers.items()]}
        await make_app(address, pool or FailingPool())(scope, receive, send)

    asyncio.run(call())
    found = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))


def test_other_machines_need_the_token_once() -> None:
    address = ServerAddress(80, "right")
    assert through(address, "/").status == 401
    assert through(address, "/static/main.js?token=wrong").status == 401
    assert through(address, "/", cookie="fitgpt-80=wrong").status == 401
    assert through(address, "/", cookie='fitgpt-80="; x=\\').status == 401
    opened = through(address, "/?token=right&gpu=4070")
    assert opened.status == 303
    assert opened.headers["location"] == "/?gpu=4070"
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert through(address, "/", cookie=cookie.partition(";")[0]).status == 200
    assert through(address, "/", cookie=cookie.partition(";")[0], origin="http://evil.example").status == 403


@pytest.mark.parametrize(("host", "status"), [("127.0.0.2:80", 200), ("localhost:80", 200), ("127.0.0.3:80", 421)])
def test_the_address_it_listens_on_is_accepted_as_host(host: str, status: int) -> None:
    assert through(ServerAddress(80, host="127.0.0.2"), "/", host=host).status == status


@pytest.mark.parametrize("query", ["", "?gpu=4070", "?family=&gpu=4070"])
def test_a_fix_without_its_family_is_a_bad_request(port: int, query: str) -> None:
    assert get(port, f"/api/fix{query}").status == 400
