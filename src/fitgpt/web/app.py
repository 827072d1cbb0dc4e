"""The web server: starlette serves the page, its files and the API; uvicorn runs it.

Every API request is computed by a worker process, within limits on its size and time. Only requests of the page itself
are answered, from this machine or with the token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api import NAMES, ApiRequest
from .form import DOCS
from .page_files import MEDIA_TYPES, page_files
from .workers import Busy, TooSlow, WorkerEnded, WorkerPool

MAX_HEAD = 16 * 1024
MAX_BODY = 512 * 1024
MAX_QUERY_LENGTH = 8192
BODY_SECONDS = 10.0
ANSWER_SECONDS = 40.0  # for one answer

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::([0-9]{1,5}))?")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class ServerAddress(NamedTuple):
    """Where the server listens. `token` is empty if only this machine can reach it, else every request needs it."""

    port: int
    token: str = ""
    host: str = "127.0.0.1"

    @property
    def name(self) -> str:
        """The host as it is written in a URL."""
        return f"[{ip_address(self.host).compressed}]" if ":" in self.host else self.host

    @property
    def cookie(self) -> str:
        """With the port in its name: browsers send a cookie to every port of a host."""
        return f"fitgpt-{self.port}"


async def run_server(address: ServerAddress, listening: socket.socket, run: str) -> None:
    """Serves until Ctrl-C. `run`: the run folder of the live tab; empty: look for one."""
    pool = WorkerPool(ANSWER_SECONDS)
    server = uvicorn.Server(uvicorn.Config(
        make_app(address, pool, run), http="h11", ws="none", lifespan="off", log_config=None, log_level="critical",
        access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=0,
        h11_max_incomplete_event_size=MAX_HEAD))
    try:
        await server.serve(sockets=[listening])
    finally:
        pool.close()


def make_app(address: ServerAddress, pool: WorkerPool, run: str = "") -> ASGIApp:
    # All files by their path in the address, read once: a request chooses one of these.
    files = {f"/{path}".removesuffix("index.html"): content for path, content in page_files().items()}
    files |= {f"/docs/{path.name}": path.read_bytes() for path in DOCS.glob("*.md")}

    async def file(request: Request) -> Response:
        path = request.url.path
        if path not in files:
            raise HTTPException(404, "There is no such file.")
        return Response(files[path], media_type=MEDIA_TYPES[Path(path).suffix or ".html"],
                        headers={"cache-control": "no-cache"})

    async def get_answer(request: Request) -> Response:
        name, query = request.path_params["name"], request.url.query
        if name not in NAMES or name == "paste":
            raise HTTPException(405 if name == "paste" else 404, "There is no such API request.")
        if len(query) > MAX_QUERY_LENGTH:
            raise HTTPException(414, "The address is too long.")
        if name == "fix" and not request.query_params.get("family"):
            raise HTTPException(400, "A fix is of a family: family=NAME is missing.")
        return await _answer(request, pool, ApiRequest(name, query, run=run))

    async def paste(request: Request) -> Response:
        body = await _json_body(request)
        text, query = body.get("text"), body.get("query")
        if not isinstance(text, str) or not isinstance(query, str | None):
            raise HTTPException(400, "The body must have a text, and the query of a plan or null.")
        return await _answer(request, pool, ApiRequest("paste", query, text))

    app = Starlette(
        routes=[Route("/api/paste", paste, methods=["POST"]), Route("/api/{name}", get_answer),
                Route("/{path:path}", file)],
        exception_handlers={HTTPException: _http_error, Exception: _bug})
    return SecurityMiddleware(app, address)


class SecurityMiddleware:
    """Checks Host, Origin and token of every request, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, address: ServerAddress) -> None:
        self._app, self._address = app, address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (self._rejection(scope) or self._app)(scope, receive, send_with_headers)

    def _rejection(self, scope: Scope) -> Response | None:
        """Why a request is not answered; None if it is.

        Any web page can make a browser send requests to 127.0.0.1, and DNS rebinding can point a foreign name there. So
        the Host must be ours, and an Origin, if there is one, must equal it.
        """
        request, address = Request(scope), self._address
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not (parts := _HOST.fullmatch(hosts[0])):
            return _problem(400, "A request must have exactly one valid Host header.")
        url = f"http://{address.name}:{address.port}"
        if not address.token and (
                parts[1].lower() not in (*LOOPBACK_NAMES, address.name) or int(parts[2] or 80) != address.port):
            return _problem(421, f"This server is {url}, but the request is for {hosts[0]!r}.", f"{url}/")
        sites = request.headers.getlist("sec-fetch-site") if scope["path"] != "/" else []
        if any(origin != f"http://{hosts[0]}" for origin in request.headers.getlist("origin")) or any(
                site not in ("same-origin", "none") for site in sites):
            return _problem(403, "Requests from pages of other sites are not answered.")
        if not address.token:
            return None

        # From the URL, or from the cookie that this URL sets. In constant time, so that timing does not reveal how many
        # characters are right.
        in_url = request.query_params.get("token", "")
        if not any(hmac.compare_digest(given.encode("utf-8", "replace"), address.token.encode())
                   for given in (in_url, request.cookies.get(address.cookie, ""))):
            return _problem(401, "This page needs the token that fitgpt serve printed.",
                            "Open the whole address that it printed, from http:// to the end.")
        if not in_url:
            return None
        rest = request.url.remove_query_params("token").query  # a cookie replaces the token: the address can be shared
        reply = RedirectResponse(f"/?{rest}" if rest else "/", 303)
        reply.set_cookie(address.cookie, address.token, httponly=True, samesite="strict")
        return reply


async def _answer(request: Request, pool: WorkerPool, wanted: ApiRequest) -> Response:
    """Cancelled if the browser disconnects, so that no worker computes what nobody reads."""
    answering = asyncio.ensure_future(pool.answer(wanted))

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnected = asyncio.ensure_future(disconnect())
    await asyncio.wait((answering, disconnected), return_when=asyncio.FIRST_COMPLETED)
    disconnected.cancel()
    if not answering.done():
        answering.cancel()
        return Response(status_code=499)
    try:
        reply = answering.result()
    except Busy:
        return _problem(503, "Too many requests are waiting for an answer.", "Close other tabs with this page.")
    except TooSlow:
        return _problem(503, f"The answer took longer than {ANSWER_SECONDS:.0f} s and was stopped.",
                        "fitgpt plan in a terminal has no time limit.")
    except WorkerEnded:
        return _problem(503, "The process that computes the answers ended.",
                        "Reload the page; if it ends again, the terminal of fitgpt serve shows why.")
    return Response(reply, 500 if reply.startswith(b'{"bug"') else 200, media_type="application/json")


async def _json_body(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "The content-type must be application/json.")
    too_large = HTTPException(413, f"A pasted text may have at most {MAX_BODY // 1024} KiB: paste its last part.")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 20 or int(length) > MAX_BODY:
        raise too_large
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise too_large
        parsed = json.loads(body)
    except TimeoutError:
        raise HTTPException(408, f"The body did not arrive within {BODY_SECONDS:.0f} s.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The body is incomplete.") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is not valid JSON.") from None
    if not isinstance(parsed, dict):
        raise HTTPException(400, "The body must be a JSON object.")
    return parsed


def _problem(status: int, what: str, fix: str = "") -> JSONResponse:
    return JSONResponse({"problem": {"what": what, "fix": fix, "settings": {}}}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, error.detail)


async def _bug(request: Request, error: Exception) -> Response:
    return _problem(500, "This is a bug in fitgpt.", "Please report it with what fitgpt serve printed.")
