"""Worker processes: time limit, cancelled requests, a full queue, and slow answers that do not delay quick ones."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import pytest

from fitgpt.web.api import ApiRequest, answer
from fitgpt.web.workers import MAX_WAITING, Busy, TooSlow, Worker, WorkerEnded, WorkerPool

TIMEOUT = 60
PLAN = ApiRequest("plan", "gpu=4070&n_layer=1")
SLOW = ApiRequest("gpus", "gpu=4070&n_layer=150&compile=False")  # seconds
INVALID = ApiRequest("plan", "gpu=4070&n_layer=0")               # answered soonest


def run(act: Callable[[], Awaitable[None]]) -> None:
    """Runs `act` and then ends every worker."""
    async def with_timeout() -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                await act()
        finally:
            for process in multiprocessing.active_children():
                process.kill()

    asyncio.run(with_timeout())


def test_an_answer_over_the_time_limit_is_stopped_and_the_next_is_computed() -> None:
    async def act() -> None:
        worker = Worker(0.01)
        with pytest.raises(TooSlow):
            await worker.answer(SLOW)
        worker.seconds = TIMEOUT
        assert json.loads(await worker.answer(PLAN))["verdict"]

    run(act)


def test_a_worker_that_dies_is_replaced() -> None:
    async def act() -> None:
        worker = Worker(TIMEOUT)
        assert b"fits" in await worker.answer(PLAN)
        answering = asyncio.ensure_future(worker.answer(SLOW))
        await asyncio.sleep(0.2)
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises(WorkerEnded):
            await answering
        assert b"fits" in await worker.answer(PLAN)

    run(act)


def test_a_request_cancelled_while_it_waits_is_never_computed() -> None:
    class RecordingWorker(Worker):
        submitted: list[str]

        def _submit(self, request: ApiRequest) -> Future[bytes]:
            self.submitted.append(request.name)
            return super()._submit(request)

    async def act() -> None:
        worker = RecordingWorker(TIMEOUT)
        worker.submitted = []
        computing, waiting = (asyncio.ensure_future(worker.answer(request)) for request in (SLOW, PLAN))
        await asyncio.sleep(0.1)
        waiting.cancel()
        computing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert b"problem" in await worker.answer(INVALID._replace(name="exact"))  # after SLOW, which has begun
        assert worker.submitted == ["gpus", "exact"]

    run(act)


def test_more_requests_than_may_wait_are_rejected() -> None:
    async def act() -> None:
        worker = Worker(TIMEOUT)
        answers = await asyncio.gather(*(worker.answer(INVALID) for _ in range(MAX_WAITING + 3)),
                                       return_exceptions=True)
        assert [isinstance(each, Busy) for each in answers] == [False] * MAX_WAITING + [True] * 3

    run(act)


def test_a_slow_answer_does_not_delay_a_quick_one() -> None:
    async def act() -> None:
        pool = WorkerPool(TIMEOUT)
        slow = asyncio.ensure_future(pool.answer(SLOW))
        assert b"fits" in await pool.answer(PLAN)
        assert not slow.done()
        pool.close()
        with pytest.raises(WorkerEnded):
            await slow

    run(act)


def test_a_mistake_is_a_problem_and_a_crash_is_a_bug(capfd: pytest.CaptureFixture[str]) -> None:
    problem = answer(ApiRequest("plan", "n_embd=500&gpu=4070"))["problem"]
    assert problem["settings"][0].keys() == {"n_head"}
    assert "bug in fitgpt" in answer(ApiRequest("paste", None, text=None))["bug"]  # type: ignore[arg-type]
    assert "TypeError" in capfd.readouterr().err


def test_answers_load_neither_torch_nor_numpy_nor_the_server() -> None:
    script = ("import sys\nfrom fitgpt.web.api import ApiRequest, answer\n"
              "for name in ('form', 'plan', 'step', 'exact', 'fixes', 'live'):\n"
              "    answer(ApiRequest(name, 'gpu=4070&n_layer=1'))\n"
              "assert not {'torch', 'numpy', 'starlette', 'uvicorn'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode == 0, ended.stderr
