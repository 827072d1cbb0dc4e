"""Hostile HTTP requests to a running `fitgpt serve`: all refused with the right status, and the page still answers.

A case is one request, or one kind of crowd of connections. `status` is what must come back; None means that the server
may close the connection without an answer. Slow clients are waited for, up to the server's own limits.
"""

from __future__ import annotations

import atexit
import json
import random
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tests.web_server import serving

from . import fuzz_inputs
from .outcome import Campaign, Outcome, failed

REQUIRED = "all refused; slow clients excepted"
WAIT_S = 60.0   # the server gives a slow body 10 s, an answer 40 s
QUERIES = 300   # generated ones to every API request
API = ("plan", "exact", "fix", "fit", "form", "live")


class Request(NamedTuple):
    data: bytes
    statuses: tuple[int | None, ...]


def get(path: str, *headers: str, host: str = "HOST", method: str = "GET", version: str = "HTTP/1.1",
        body: bytes = b"") -> bytes:
    lines = [f"{method} {path} {version}", f"Host: {host}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def post(body: bytes, *headers: str, length: str | None = None, kind: str = "application/json") -> bytes:
    return get("/api/paste", f"Content-Type: {kind}", f"Content-Length: {len(body) if length is None else length}",
               *headers, method="POST", body=body)


def requests() -> dict[str, Request]:
    found: dict[str, tuple[bytes, int | tuple[int | None, ...]]] = {}
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost:9", "localhost.", "[::2]", "0.0.0.0", "127.1",
                 "2130706433", "0x7f.1", "user@127.0.0.1", "127.0.0.1:PORT.evil", "[::ffff:127.0.0.1]:PORT",
                 "xn--localhost", "localhost:99999", "LOCALHOST:1"):
        found[f"host {host}"] = get("/", host=host), (421, 400)
    for host in ("", " ", "a/b", "a?b", "a b", "\t", "localhost:", ":80", "[::1", "a" * 300, "é", "HOST:PORT"):
        found[f"malformed host {host[:20]!r}"] = get("/", host=host), (400, 421)
    found |= {
        "no host": (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
        "two hosts": (get("/", "Host: HOST"), 400),
        "HTTP/1.0 without a host": (b"GET / HTTP/1.0\r\n\r\n", 400),
        "HTTP/0.9": (b"GET /\r\n\r\n", (400, None)),
        "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, None)),
        "TLS hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", (400, None)),
        "absolute address of another host": (get("http://evil.example/"), (400, 404, 421)),
        "CONNECT": (get("evil.example:443", method="CONNECT"), (400, 404, 405, 421)),
        "asterisk": (get("*", method="OPTIONS"), (400, 404, 405)),
        "100,000 headers": (get("/", *(f"X-{number}: y" for number in range(100_000))), (400, 431, None)),
        "one header of 1 MB": (get("/", "X: " + "y" * 10**6), (400, 431, None)),
        "address of 1 MB": (get("/" + "a" * 10**6), (400, 404, 414, None)),
        "query of 9,000 characters": (get("/api/plan?gpu=4070&x=" + "y" * 9000), 414),
        "header without a colon": (get("/", "nonsense"), 400),
        "folded header": (get("/", "X: a\r\n b"), (200, 400)),
        "NUL in a header": (get("/", "X: a\0b"), 400),
        "NUL in the path": (get("/a\0b"), (400, 404)),
        "bare line feeds": (b"GET / HTTP/1.1\nHost: evil.example\n\n", (400, 421)),
        "websocket": (get("/", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x",
                          "Sec-WebSocket-Version: 13"), (200, 400, 404, 426)),
    }
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1", "https://HOST", "http://HOST.evil", ""):
        found[f"origin {origin!r}"] = get("/api/form", f"Origin: {origin}"), 403
    for site in ("cross-site", "same-site", "x"):
        found[f"sec-fetch-site {site}"] = get("/api/form", f"Sec-Fetch-Site: {site}"), 403
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X" * 100):
        found[f"method {method[:9]}"] = get("/", method=method), 405
    for path in ("/../../etc/passwd", "/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/docs/",
                 "//etc/passwd", "/static//../../x", "/docs/../app.py", "/docs/..%5capp.py", "/static/app.py", "/%00",
                 "/static/strings/", "/api/", "/api/../static/page.js", "/api/__class__", "/api/fix/x", "/.git/config",
                 "/static/%252e%252e/app.py", "/\\..\\..\\x", "/static/strings/en.json%00.js"):
        found[f"path {path}"] = get(path), (400, 404)
    found |= {
        "text/plain": (post(b'{"text": "x"}', kind="text/plain"), 415),
        "form": (post(b"text=x", kind="application/x-www-form-urlencoded"), 415),
        "no type": (post(b"{}", kind=""), 415),
        "600 kB": (post(b"x" * 600_000), 413),
        "1 GB claimed": (post(b"{}", length="1000000000"), 413),
        "length -1": (post(b"{}", length="-1"), (400, 413)),
        "length 1e3": (post(b"{}", length="1e3"), (400, 413)),
        "length ٣": (post(b"{}", length="\xb3"), (400, 413)),
        "two lengths": (post(b"{}", "Content-Length: 5"), 400),
        "length and chunks": (post(b"0\r\n\r\n", "Transfer-Encoding: chunked"), 400),
        "1.3 MB in chunks": (get("/api/paste", "Content-Type: application/json", "Transfer-Encoding: chunked",
                                 method="POST", body=b"fffff\r\n" + b" " * 0xfffff + b"\r\n0\r\n\r\n"), 413),
        "chunk of 2**64": (get("/api/paste", "Content-Type: application/json", "Transfer-Encoding: chunked",
                               method="POST", body=b"10000000000000000\r\nx"), (400, 408, 413)),
        "gzip chunks": (get("/api/paste", "Content-Type: application/json", "Transfer-Encoding: gzip, chunked",
                            method="POST", body=b"0\r\n\r\n"), (400, 501)),
        "body that never comes": (post(b"{", length="10"), 408),
        "not JSON": (post(b"{"), 400), "no object": (post(b"[]"), 400), "no text": (post(b"{}"), 400),
        "text as a number": (post(b'{"text": 1}'), 400), "query as a list": (post(b'{"text": "", "query": []}'), 400),
        "100,000 brackets": (post(b"[" * 100_000), 400), "NaN": (post(b"NaN"), 400),
        "invalid UTF-8": (post(b'{"text": "\xff"}'), 400), "empty body": (post(b""), 400),
        "paste with GET": (get("/api/paste"), 405),
    }
    return {name: Request(data, statuses if isinstance(statuses, tuple) else (statuses,))
            for name, (data, statuses) in found.items()}


def generated(case: str) -> tuple[bytes, tuple[int | None, ...]]:
    """A query with odd values, or pasted text: the answer is 200, and a problem is part of it. Never 500."""
    chance = random.Random(case)
    if chance.random() < 0.3:
        text = fuzz_inputs.pasted(chance)
        body = json.dumps({"text": text, "query": chance.choice((None, fuzz_inputs.query_string(chance)))})
        return post(body.encode("utf-8", "surrogatepass")), (200, 400, 413)
    query = quote(fuzz_inputs.query_string(chance).encode("utf-8", "surrogatepass"), safe="=&+%")
    return get(f"/api/{chance.choice(API)}?{query}"), (200, 400, 404, 414, 503)


def crowd(kind: str, where: tuple[str, int]) -> str:
    """Many connections at once. → what went wrong."""
    starts = {"idle": b"", "half a head": b"GET / HTTP/1.1\r\nHost: ", "half a body": post(b"{", length="400000")}
    with closing_all(where, 400 if kind != "idle" else 1000, starts[kind]):
        status, body = exchange(get("/"), where)
        return "" if status == 200 and b"<html" in body else f"the page answered {status} meanwhile"


class closing_all:
    def __init__(self, where: tuple[str, int], count: int, data: bytes) -> None:
        self._sockets = [socket.create_connection(where, timeout=WAIT_S) for _ in range(count)]
        for each in self._sockets:
            each.sendall(filled(data, where))

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()


def filled(data: bytes, where: tuple[str, int]) -> bytes:
    return data.replace(b"HOST", f"{where[0]}:{where[1]}".encode(), 2).replace(b"PORT", str(where[1]).encode())


def exchange(data: bytes, where: tuple[str, int]) -> tuple[int | None, bytes]:
    """(the status, None if the connection was closed without one; everything that came back)."""
    with closing(socket.create_connection(where, timeout=WAIT_S)) as connection:
        answer = b""
        with suppress(ConnectionError, BrokenPipeError):
            connection.sendall(filled(data, where))
        with suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    line = answer.split(b"\r\n", 1)[0].split(b" ")
    return (int(line[1]) if len(line) > 1 and line[1].isdigit() else None), answer


def campaign(folder: Path) -> Campaign:
    server: Iterator[tuple[tuple[str, int], object]] = _server(folder)
    where, process = next(server)
    atexit.register(server.close)  # type: ignore[attr-defined]
    known = requests()

    def run(case: str) -> Outcome:
        kind, _, name = case.partition("/")
        if kind == "crowd":
            wrong = crowd(name, where)
            return failed("page blocked", wrong) if wrong else Outcome("page answered meanwhile")
        data, statuses = known[name] if kind == "request" else generated(case)
        try:
            status, answer = exchange(data, where)
        except TimeoutError:
            return failed("hangs", f"no answer in {WAIT_S:g} s\n{data[:500]!r}")
        if status not in statuses:
            return failed("wrong status", f"{status}, not {statuses}\n{data[:800]!r}\n{answer[:1200]!r}")
        if status is not None and b"access-control-" in answer.lower():
            return failed("wrong headers", f"{answer[:1000]!r}")
        if exchange(get("/"), where)[0] != 200 or process.poll() is not None:  # type: ignore[attr-defined]
            return failed("server gone", f"after {data[:500]!r}")
        return Outcome("answered" if status == 200 else "refused")

    return Campaign([*(f"request/{name}" for name in known), *(f"generated/{number:03d}" for number in range(QUERIES)),
                     "crowd/idle", "crowd/half a head", "crowd/half a body"], run)


def _server(folder: Path) -> Iterator[tuple[tuple[str, int], object]]:
    with serving(folder) as (address, process):
        parts = urlsplit(address)
        yield (parts.hostname or "", parts.port or 0), process
