"""Runs on several gloo ranks on the CPU: each rank is a forked process, so that torch is not loaded again."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import FitError
from fitgpt.engine.model import GPT
from fitgpt.engine.ranks import LostRank
from fitgpt.training import build, run
from fitgpt.training.build import make_model

LOST = 99           # exit code of a rank that lost another one
TIME_LIMIT_S = 120  # after which a rank ends itself, so that no test can hang
OnRank = Callable[[int], AbstractContextManager[Any]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(config: RunConfig, world: int, *, around: OnRank = lambda rank: nullcontext(),
          stop: Callable[[int], Callable[[], bool]] = lambda rank: lambda: False, float64: bool = False,
          fallbacks: Any = None,
          other: Callable[[int, RunConfig], RunConfig] = lambda rank, config: config) -> list[int]:
    """The process ids of the ranks. `around`: entered on each rank; `other`: changes its config."""
    torch.set_num_threads(1)  # a forked process has no other threads of ours
    if world > 1:
        config = replace(config, gpus=f"{world}xcpu")
    environment = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                   "GLOO_SOCKET_IFNAME": "lo"}
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            signal.alarm(TIME_LIMIT_S)
            os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
            log = open(Path(config.out_dir).parent / f"rank-{rank}.log", "a", buffering=1)  # noqa: SIM115
            sys.stdout = sys.stderr = log
            if float64:
                build.make_model = in_float64  # type: ignore[assignment]
            with around(rank):
                run.run(other(rank, config).to_dict(), [], stop(rank), fallbacks=fallbacks)
            code = 0
        except LostRank:
            code = LOST
        except FitError as error:
            print(error, file=log)
            code = error.exit_code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return pids


def wait(pids: list[int]) -> list[int]:
    """The exit codes; negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def trained(config: RunConfig, world: int, **options: Any) -> list[int]:
    return wait(start(config, world, **options))


def logs(config: RunConfig) -> str:
    return "".join(path.read_text() for path in sorted(Path(config.out_dir).parent.glob("rank-*.log")))


def in_float64(*given: Any, **named: Any) -> GPT:
    model = make_model(*given, **named).double()
    model.compute_dtype = model.residual_dtype = torch.float64
    return model


def killed_at_random(config: RunConfig, world: int, victim: int | None, delay: float) -> list[int]:
    """One life of a run: after its next checkpoint and a delay, a rank is killed. All exit codes 0: it got through."""
    folder = Path(config.out_dir) / "checkpoints"
    before = {path.name for path in folder.glob("step-*")}
    pids = start(replace(config, init_from="resume" if before else "scratch"), world)
    ended: dict[int, int] = {}
    while {path.name for path in folder.glob("step-*")} <= before and len(ended) < world:
        for pid in pids:
            if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.005)
    time.sleep(delay)
    if victim is not None and pids[victim] not in ended:
        os.kill(pids[victim], signal.SIGKILL)
    return [ended[pid] if pid in ended else wait([pid])[0] for pid in pids]
