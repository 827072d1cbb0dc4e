"""API requests → JSON, computed in two worker processes so that the server stays responsive.

One worker computes what the page needs while a slider moves, the other what takes longer: a slow answer never delays a
quick one. A worker ends when an answer takes too long or the server is gone, and the next request starts a new one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from ..core.worker_process import begin_worker, sigint_blocked
from .api import QUICK, ApiRequest, answer_json

MAX_WAITING = 32  # requests per worker


class Busy(Exception):
    """Too many requests are waiting."""


class TooSlow(Exception):
    """The answer took longer than the time limit."""


class WorkerEnded(Exception):
    """The worker ended before the time limit: it did not start, or something killed it."""


# ---- in the worker process


def compute(request: ApiRequest, seconds: float) -> bytes:
    """The answer as JSON. Ends the process if it takes longer than `seconds`: nothing else stops a computation."""
    limit = threading.Timer(seconds, os._exit, (1,))
    limit.daemon = True
    limit.start()
    try:
        return answer_json(request).encode()
    finally:
        limit.cancel()


# ---- in the server


class Worker:
    """One process that computes one answer at a time, in the order of the requests."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._executor = _start()

    async def answer(self, request: ApiRequest) -> bytes:
        """JSON. A request that is cancelled while it waits for its turn is never computed."""
        if self._waiting >= MAX_WAITING:
            raise Busy
        self._waiting += 1
        begun = time.monotonic()
        try:
            async with self._turn:
                begun = time.monotonic()
                computing = asyncio.wrap_future(self._submit(request))
                computing.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs it
                try:
                    return await asyncio.shield(computing)
                except asyncio.CancelledError:
                    await asyncio.wait({computing})  # until then the worker is busy
                    raise
        except BrokenProcessPool:
            raise (TooSlow if time.monotonic() - begun >= self.seconds else WorkerEnded) from None
        finally:
            self._waiting -= 1

    def _submit(self, request: ApiRequest) -> Future[bytes]:
        try:
            return self._executor.submit(compute, request, self.seconds)
        except BrokenProcessPool:
            self._executor = _start()
            return self._executor.submit(compute, request, self.seconds)


def _start() -> ProcessPoolExecutor:
    """A pool whose process has started. `spawn` inherits no threads, and nothing is imported from the current
    directory: __main__.py sets PYTHONSAFEPATH, and the child gets the server's sys.path."""
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin_worker)
    with sigint_blocked():
        executor.submit(os.getpid)
    return executor


class WorkerPool:
    """The two workers."""

    def __init__(self, seconds: float) -> None:
        self._quick, self._slow = Worker(seconds), Worker(seconds)

    async def answer(self, request: ApiRequest) -> bytes:
        """JSON. Raises Busy, TooSlow or WorkerEnded."""
        return await (self._quick if request.name in QUICK else self._slow).answer(request)

    def close(self) -> None:
        """Ends the workers at once, whatever they compute."""
        for process in multiprocessing.active_children():
            process.kill()
