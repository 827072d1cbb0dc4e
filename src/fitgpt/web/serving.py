"""The server under the page: uvicorn, without its log, and with an end to its patience."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .guard import Door
from .lanes import Lanes


def make_server(door: Door, lanes: Lanes, *, connections: int, head: int, patience: float) -> uvicorn.Server:
    from .app import make_app

    config = uvicorn.Config(
        make_app(door, lanes), http=_impatient(patience, connections), ws="none", lifespan="off", loop="asyncio",
        log_config=None, log_level="critical", access_log=False, server_header=False, proxy_headers=False,
        timeout_keep_alive=10, timeout_graceful_shutdown=1, limit_concurrency=connections,
        h11_max_incomplete_event_size=head)
    return uvicorn.Server(config)


def _impatient(patience: float, most: int) -> type[H11Protocol]:
    """Closes a connection on which nothing was completed for so long: a client that sends its request byte by byte,
    or never reads its answer, holds one of a limited number of connections. Where all are held, a new one takes the
    place of the one that has been waited for longest; one that is being answered goes last."""

    class Impatient(H11Protocol):  # type: ignore[misc]  # its types are not read: see pyproject.toml
        _timer: asyncio.TimerHandle | None = None
        _since = 0.0  # when it was opened, or last answered

        def is_answered(self) -> bool:
            """Whether its request is complete and its answer is not."""
            return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._since = self.loop.time()
            others = [each for each in self.connections if each is not self and not each.transport.is_closing()]
            if len(others) + 1 >= most:
                min(others, key=lambda each: (each.is_answered(), each._since), default=self).transport.abort()
            self._wait_anew()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._since = self.loop.time()
            self._wait_anew()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()

        def _wait_anew(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(patience, self.transport.abort)

    return Impatient
