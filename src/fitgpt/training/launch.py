"""Which ranks a `fitgpt train` process starts, and with which environment. Never imports torch.

Either torchrun has started one `fitgpt train` per rank, and each starts one worker; or --gpus names the GPUs, and one
`fitgpt train` starts all workers, with the variables that torchrun would set. (torchrun itself is not used for that: it
imports torch in the parent process, and prints a table of its own where ours is one sentence.)
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..config.run_config import RunConfig
from ..core.errors import DeviceError, Interrupted, NumericsError, UsageError
from ..hardware import nvidia

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOOK_EVERY_S = 0.05
OF_ALL_RANKS = (NumericsError.exit_code, Interrupted.exit_code)
GRACE_S = 10.0  # after one rank has failed: the others notice by themselves, unless they wait for their GPU


def launched_ranks(environment: Mapping[str, str]) -> int:
    """How many ranks a launcher such as torchrun has started; 1: none has."""
    world = environment.get("WORLD_SIZE", "").strip() or "1"
    missing = [name for name in VARIABLES if not environment.get(name)]
    if world != "1" and (missing or not world.isdecimal()):
        raise UsageError(f"WORLD_SIZE is {world}, as under torchrun, but {', '.join(missing)} not set.",
                         "torchrun --nproc-per-node=2 -m fitgpt train …; or, if your shell still has it: unset "
                         "WORLD_SIZE")
    return int(world)


def with_ranks(config: RunConfig, environment: Mapping[str, str]) -> RunConfig:
    """The config with the ranks that this machine, or a launcher, gives it; one GPU is `device`, without ranks."""
    world = launched_ranks(environment)
    if world > 1:
        if config.gpus and config.gpus != f"{world}xranks":
            raise UsageError(f"--gpus={config.gpus} under torchrun, which has started {world} ranks already.",
                             "Leave out --gpus; or without torchrun: fitgpt train --gpus=all …")
        return replace(config, gpus=f"{world}xranks")
    if not config.gpus or config.gpus.endswith("xcpu"):
        return config
    if "x" in config.gpus:
        raise UsageError(f"--gpus={config.gpus} names GPUs to plan for. Training uses those that are here.",
                         "--gpus=all, or --gpus=0,1")
    if config.device in ("cpu", "mps"):
        raise UsageError(f"--gpus={config.gpus} and --device={config.device} contradict each other.",
                         f"--gpus={config.gpus} --device=auto")
    seen = nvidia.survey()
    if not seen.gpus:
        why = seen.reason or f"CUDA_VISIBLE_DEVICES={seen.chosen!r} hides all of them"
        raise DeviceError(f"--gpus={config.gpus}: there is no GPU here: {why}.", "fitgpt doctor")
    wanted = list(range(len(seen.gpus))) if config.gpus == "all" else [int(each) for each in config.gpus.split(",")]
    if absent := [index for index in wanted if index >= len(seen.gpus)]:
        there = ", ".join(f"{index} ({gpu.name})" for index, gpu in enumerate(seen.gpus))
        raise UsageError(f"More ranks than GPUs: --gpus={config.gpus} names GPU {absent[0]}, and here is {there}.",
                         "--gpus=all")
    if len(wanted) == 1:
        return replace(config, gpus="", device=f"cuda:{wanted[0]}")
    return replace(config, gpus=",".join(map(str, wanted)))


def devices(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The devices of the ranks that this process starts."""
    if config.ranks == 1 or config.device == "cpu":
        return [config.device]
    if config.gpus.endswith("xcpu"):
        return ["cpu"]
    if "x" in config.gpus:
        return [f"cuda:{environment['LOCAL_RANK']}"]
    return [f"cuda:{index}" for index in config.gpus.split(",")]


def rank_environments(config: Mapping[str, Any], environment: Mapping[str, str]) -> list[dict[str, str]]:
    """What the environment of each worker has beyond that of this process; one worker per entry."""
    world = RunConfig.from_dict(config).ranks
    if world == 1 or launched_ranks(environment) > 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":  # all ranks are here, whatever this machine's name resolves to
        shared["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def wait_for(workers: Sequence[subprocess.Popen[bytes]], poll_s: float, is_stuck: Callable[[], bool]) -> list[int]:
    """Waits for the end of all workers → their ranks, in the order in which they ended. When one has failed, the others
    get GRACE_S seconds to end by themselves and are then killed. `is_stuck` is called every `poll_s` seconds; where it
    is true, those that still run are left out."""
    ended: list[int] = []
    deadline, next_look = float("inf"), time.monotonic() + poll_s
    while len(ended) < len(workers):
        with suppress(subprocess.TimeoutExpired):  # returns at once when a single worker ends
            next(worker for rank, worker in enumerate(workers) if rank not in ended).wait(
                poll_s if len(workers) == 1 else LOOK_EVERY_S)
        for rank, worker in enumerate(workers):
            if rank not in ended and worker.poll() is not None:
                ended.append(rank)
                if worker.returncode:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            for rank, worker in enumerate(workers):
                if rank not in ended:
                    worker.kill()
        if time.monotonic() >= next_look and len(ended) < len(workers):
            next_look = time.monotonic() + poll_s
            if is_stuck():
                break
    return ended


def culprit(ended: Sequence[int], codes: Sequence[int], reports: Sequence[Mapping[str, Any]]) -> int:
    """The rank whose end explains the others': the first that failed for a reason of its own."""
    failed = [rank for rank in ended if codes[rank]]
    own = [rank for rank in failed if not reports[rank].get("lost_rank")]
    return (own or failed or [0])[0]


def named(report: dict[str, Any], rank: int, config: Mapping[str, Any],
          environment: Mapping[str, str]) -> dict[str, Any]:
    """The report with `where` it comes from, if there are several ranks. What is true of all of them names none."""
    run = RunConfig.from_dict(config)
    if run.ranks == 1 or report.get("code") in OF_ALL_RANKS:
        return report
    rank = int(environment["RANK"]) if run.gpus.endswith("xranks") else rank
    device = devices(run, environment)
    return {**report, "where": f"Rank {rank} of {run.ranks} ({device[rank % len(device)]}): "}
