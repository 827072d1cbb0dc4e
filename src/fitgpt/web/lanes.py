"""Where answers come from: worker processes, one a lane, so that what takes long never stands before what is quick."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LONGEST_REPLY = 16 * 2**20
MOST_WAITING = 32  # in one lane
SOON = 1.0         # seconds
# Which lane a question goes to. The page moves with the first; others may take seconds, and what nobody waits for any
# more is dropped.
LANES = {"form": "quick", "plan": "quick", "whole": "quick", "step": "quick", "exact": "slow", "cards": "slow",
         "fixes": "fixes", "fix": "fixes", "fit": "long", "explain": "long", "live": "live"}
AT_ONCE = ("quick", "live")
STANDING_BACK = 10  # how nice the other lanes' workers are: there are more of them than cores


class Busy(Exception):
    """Too many questions are waiting already."""


class TooLong(Exception):
    """An answer took longer than one may take."""


class Lane:
    """One worker, started when it is first asked; its questions are answered one after another."""

    def __init__(self, seconds: float, run: str = "", niceness: int = 0) -> None:
        self._seconds, self._run, self._niceness = seconds, run, niceness
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._worker: asyncio.subprocess.Process | None = None

    async def ask(self, question: Mapping[str, Any]) -> bytes:
        """The answer as one line of JSON. A question that is withdrawn (cancelled) before its turn is never asked. One
        that is being worked on may soon be answered; if not, its worker is ended, and the next one starts another."""
        if self._waiting >= MOST_WAITING:
            raise Busy
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        answering = asyncio.ensure_future(self._answer(json.dumps(question).encode() + b"\n"))
        answering.add_done_callback(self._done)
        try:
            return await asyncio.shield(answering)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(SOON, answering.cancel)
            raise

    def _done(self, answering: asyncio.Future[bytes]) -> None:
        self._turn.release()
        if not answering.cancelled():
            answering.exception()  # looked at, or it would be complained of

    async def _answer(self, question: bytes) -> bytes:
        worker = self._worker or await self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        whole = False
        try:
            async with asyncio.timeout(self._seconds):
                worker.stdin.write(question)
                await worker.stdin.drain()
                reply = await worker.stdout.readline()
            whole = reply.endswith(b"\n")
        except (TimeoutError, ConnectionError, ValueError) as error:
            raise TooLong from error
        finally:
            if not whole:
                await self.close()
        if not whole:
            raise TooLong
        return reply

    async def _start(self) -> asyncio.subprocess.Process:
        # Ctrl-C is the server's; in another session than its own, Linux would not look at how nice a worker is.
        apart: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        self._worker = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "fitgpt.web.worker", self._run, str(self._niceness),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LONGEST_REPLY, **apart)
        return self._worker

    async def close(self) -> None:
        """Ends the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()


class Lanes:
    def __init__(self, seconds: float, run: str = "") -> None:
        self._lanes = {name: Lane(seconds, run, 0 if name in AT_ONCE else STANDING_BACK)
                       for name in dict.fromkeys(LANES.values())}

    async def ask(self, question: Mapping[str, Any]) -> bytes:
        return await self._lanes[LANES[question["ask"]]].ask(question)

    async def warm(self) -> None:
        """Workers take a while to start: those that every page asks have started when the first one does."""
        for ask in ("form", "plan", "exact", "fixes"):
            with suppress(Busy, TooLong):
                await self.ask({"ask": ask, "query": "gpu=RTX+4070&n_layer=1"})

    async def close(self) -> None:
        for lane in self._lanes.values():
            await lane.close()
