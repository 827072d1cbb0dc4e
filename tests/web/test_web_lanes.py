"""Where the page's answers come from: workers that can be given up, that wait for each other, that stand back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from fitgpt.web import lanes as lanes_module
from fitgpt.web.lanes import LANES, Busy, Lane, Lanes, TooLong

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def in_lane(lane: Lane, act: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        try:
            await act()
        finally:
            await lane.close()

    asyncio.run(all_of_it())


def test_an_answer_that_takes_too_long_is_given_up_and_the_next_is_answered() -> None:
    lane = Lane(30)

    async def act() -> None:
        assert b"cards" in await lane.ask({"ask": "form"})
        lane._seconds = 0.001
        with pytest.raises(TooLong):
            await lane.ask({"ask": "plan", "query": "gpu=4070"})
        lane._seconds = 30
        assert b"fits" in await lane.ask({"ask": "plan", "query": "gpu=4070"})

    in_lane(lane, act)


def test_a_withdrawn_question_and_a_dead_worker_leave_the_lane_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "SOON", 0.1)
    lane = Lane(30)

    async def act() -> None:
        asking = asyncio.ensure_future(lane.ask({"ask": "exact", "query": "gpu=4070&n_layer=190&compile=False"}))
        await asyncio.sleep(0.3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert b"fits" in await lane.ask({"ask": "plan", "query": "gpu=4070"})
        assert lane._worker is not None
        lane._worker.kill()
        with pytest.raises(TooLong):
            await lane.ask({"ask": "plan", "query": "gpu=4070"})
        assert b"fits" in await lane.ask({"ask": "plan", "query": "gpu=4070"})

    in_lane(lane, act)


def test_a_full_lane_says_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MOST_WAITING", 1)
    lane = Lane(30)

    async def act() -> None:
        answered_and_waiting = [asyncio.ensure_future(lane.ask({"ask": "form"})) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await lane.ask({"ask": "form"})
        await asyncio.gather(*answered_and_waiting)

    in_lane(lane, act)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities here")
def test_workers_of_long_answers_stand_back_behind_those_the_page_moves_with() -> None:
    async def niceness(ask: str) -> int:
        lanes = Lanes(30)
        try:
            await lanes.ask({"ask": ask, "query": "gpu=4070&n_layer=1"})
            worker = lanes._lanes[LANES[ask]]._worker
            assert worker is not None
            assert os.getsid(worker.pid) == os.getsid(0)  # between sessions it does not matter how nice one is
            return os.getpriority(os.PRIO_PROCESS, worker.pid)
        finally:
            await lanes.close()

    assert asyncio.run(niceness("plan")) == os.getpriority(os.PRIO_PROCESS, 0)
    assert asyncio.run(niceness("fixes")) > os.getpriority(os.PRIO_PROCESS, 0)
