"""The page's server: the page, its files, and its questions, each handed to a worker within limits of size and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..show import charts
from .guard import HEADERS, Door, has_token, refusal
from .lanes import LANES, Busy, Lanes, TooLong

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
LARGEST_BODY = 512 * 1024
BODY_SECONDS = 10.0
LONGEST_QUERY = 8192
ASKED_BY_ADDRESS = tuple(name for name in LANES if name != "explain")


def make_app(door: Door, lanes: Lanes) -> ASGIApp:
    files = _files()

    async def page(request: Request) -> Response:
        return _file(files["index.html"], ".html")

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files or name == "index.html":
            raise HTTPException(404, "There is no such file.")
        return _file(files[name], Path(name).suffix)

    async def question(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASKED_BY_ADDRESS:
            raise HTTPException(405 if name in LANES else 404, "There is no such question.")
        query = request.url.query
        if len(query) > LONGEST_QUERY:
            raise HTTPException(414, "The address is too long.")
        more, _, rest = query.partition("&") if name == "fix" else ("", "", query)
        return await _answer(request, lanes, {"ask": name, "query": rest, "more": more.removeprefix("family=")})

    async def explain(request: Request) -> Response:
        told = await _json_body(request)
        text, query = told.get("text"), told.get("query")
        if not isinstance(text, str) or not isinstance(query, str | None):
            raise HTTPException(400, "The body holds a text, and the query of a plan or null.")
        return await _answer(request, lanes, {"ask": "explain", "text": text, "query": query})

    app = Starlette(
        routes=[Route("/", page), Route("/static/{name}", file), Route("/api/explain", explain, methods=["POST"]),
                Route("/api/{name}", question)],
        exception_handlers={HTTPException: _said, Exception: _bug})
    return Guarded(app, door)


# ---- who is let in


class Guarded:
    """Around everything: who may ask, and headers that keep a browser from doing anything else with the answers."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        refused = refusal(self._door, scope["path"], scope["headers"])
        if refused is not None:
            return _problem(*refused)
        request = Request(scope)
        given = request.query_params.get("token", "")
        if not has_token(self._door, scope["headers"], given):
            return _problem(401, "This page needs the token that fitgpt serve printed.",
                            "Open the whole address that it printed, from http:// to the end.")
        if self._door.token and given:  # the token leaves the address, which may be shared
            rest = request.url.remove_query_params("token").query
            reply = RedirectResponse(f"/?{rest}" if rest else "/", 303)
            reply.set_cookie(self._door.cookie, self._door.token, httponly=True, samesite="strict")
            return reply
        return None


# ---- parts


def _files() -> dict[str, bytes]:
    """All there is to serve, read once: a request chooses among these and never names a path."""
    found = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in KINDS}
    return found | {"charts.css": charts.style().encode(), "charts.js": charts.script().encode()}


def _file(content: bytes, suffix: str) -> Response:
    return Response(content, media_type=KINDS[suffix], headers={"cache-control": "no-cache"})


async def _answer(request: Request, lanes: Lanes, question: Mapping[str, Any]) -> Response:
    """Withdrawn when the browser goes away, so that nothing is computed for nobody."""
    asking = asyncio.ensure_future(lanes.ask(question))
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return Response(status_code=499)
        reply = asking.result()
    except Busy:
        return _problem(503, "Too many questions are waiting for an answer.", "Close other tabs with this page.")
    except TooLong:
        return _problem(503, "The answer took too long, and was given up.", "fitgpt plan in a terminal has no limit.")
    finally:
        for task in (asking, leaving):
            task.cancel()
        await asyncio.gather(asking, leaving, return_exceptions=True)
    return Response(reply, 500 if reply.startswith(b'{"bug"') else 200, media_type="application/json")


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _json_body(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "The body is JSON, and its content-type says so.")
    claimed = request.headers.get("content-length", "0")
    if not claimed.isdecimal() or int(claimed) > LARGEST_BODY:
        raise HTTPException(413, f"A text to explain has at most {LARGEST_BODY // 1024} KiB.")
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_BODY:
                    raise HTTPException(413, f"A text to explain has at most {LARGEST_BODY // 1024} KiB.")
        told = json.loads(body)
    except TimeoutError:
        raise HTTPException(408, "The body did not come.") from None
    except ClientDisconnect:
        raise HTTPException(400, "The body was cut short.") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is no JSON.") from None
    if not isinstance(told, dict):
        raise HTTPException(400, "The body is a JSON object.")
    return told


def _problem(status: int, what: str, fix: str = "") -> JSONResponse:
    return JSONResponse({"problem": {"what": what, "fix": fix, "settings": {}}}, status)


async def _said(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, error.detail)


async def _bug(request: Request, error: Exception) -> Response:
    return _problem(500, "This is a bug of ours.", "Please report it with what fitgpt serve printed.")
