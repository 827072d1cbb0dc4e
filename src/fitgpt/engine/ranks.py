"""Ranks: processes that train one model together (replicated, data parallel), one per GPU, in a process group.

Each step's micro-batches are divided over the ranks, and their gradients are added up (all-reduced) in place, once per
step. All ranks hold the same weights and optimizer state and take the same decisions. Rank 0 alone writes files.

Out of memory on one rank must not leave the others waiting. So the ranks exchange a status, and this rule holds:
gradients are added up, or values exchanged, only right after a round of `worst` in which every rank was FINE, and
nothing between the two can run out of memory. A rank that failed says so in the next round, and all recover together.

Statuses and values go through CPU RAM (gloo): no rank allocates GPU memory to communicate, except what NCCL allocates
outside PyTorch's allocator. Gradients on a GPU go through NCCL, in the tensors in which they were accumulated.

Later, sharded optimizer state would replace `all_reduce` by reduce_scatter into a rank's slice, and all_gather the
weights after the step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from platform import node
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from .. import __version__
from ..config.run_config import RunConfig
from ..core.errors import DeviceError, SystemFault, UsageError
from ..runs.folder import RunFolder
from .oom import OutOfMemory

# Only a rank that has died or hangs makes others wait longer: each step begins on all ranks at nearly the same time,
# and rank 0 writes a checkpoint in minutes.
TIMEOUT = timedelta(minutes=30)
CONNECT, RETRY_S = timedelta(seconds=5), 0.2
OF_ONE_RANK = ("device",)  # options that differ between ranks

Result = TypeVar("Result")


class Status(IntEnum):
    """How a rank fares, the worst last."""

    FINE = 0
    STOP = 1           # a stop was requested
    OUT_OF_MEMORY = 2  # nothing has changed: the step can be retried
    HALF_DONE = 3      # out of memory after the optimizer has begun to change weights


class LostRank(SystemFault):
    """Another rank has ended, or cannot be reached. What happened there is in that rank's own report."""


class OtherRankOutOfMemory(MemoryError):
    """Ends an attempt on this rank because another one failed. All ranks know it already."""


@dataclass
class Ranks:
    """This process among the ranks; by default the only one."""

    rank: int = 0
    world: int = 1
    stop_requested: Callable[[], bool] = lambda: False  # on this rank
    joined: bool = False          # in a process group
    gradients: Any = None         # the process group that adds up GPU gradients; None: the default group, gloo
    stopping: bool = field(default=False, init=False)  # all ranks know that a stop was requested
    failed: tuple[Status, int] | None = field(default=None, init=False)  # what `agree` found, for `agreed`

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # ---- agreement

    def worst(self, own: Status) -> tuple[Status, int]:
        """(the worst status of any rank, a rank that has it). Every rank calls it at the same point."""
        if not self.joined:
            return own, self.rank
        code = torch.tensor(own * self.world + self.rank)
        with lost_ranks():
            dist.all_reduce(code, dist.ReduceOp.MAX)
        status, rank = divmod(int(code), self.world)
        self.stopping |= status == Status.STOP
        return Status(status), rank

    def agree(self, *, stop: bool) -> bool:
        """Before a collective in a step: False if any rank has to stop. Ends the attempt if any is out of memory."""
        status, rank = self.worst(Status.STOP if stop else Status.FINE)
        if status >= Status.OUT_OF_MEMORY:
            self.failed = status, rank
            raise OtherRankOutOfMemory(f"out of memory on rank {rank}")
        return status == Status.FINE

    def agreed(self, done: Result | OutOfMemory, *, half_done: bool) -> tuple[Result | OutOfMemory, bool]:
        """After an attempt: (what it returned, or OutOfMemory on all ranks if any failed; whether any is half done)."""
        if not self.joined:
            return done, half_done
        failed, self.failed = self.failed, None
        if failed is None:
            own = Status.STOP if self.stop_requested() else Status.FINE
            if isinstance(done, OutOfMemory):
                own = Status.HALF_DONE if half_done else Status.OUT_OF_MEMORY
            failed = self.worst(own)
        status, rank = failed
        if status < Status.OUT_OF_MEMORY:
            return done, half_done
        message = self.all_gather_object(done.message if isinstance(done, OutOfMemory) else "")[rank]
        return OutOfMemory(message, rank), status == Status.HALF_DONE

    def must_stop(self) -> bool:
        """Whether a stop was requested, as all ranks know it."""
        return self.stopping if self.joined else self.stop_requested()

    # ---- values, through CPU RAM

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of each rank, as JSON returns it."""
        if not self.joined:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with lost_ranks():
            dist.all_gather(sizes, torch.tensor([text.numel()]))
            longest = max(int(size) for size in sizes)
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
            dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - text.numel())))
        return [json.loads(bytes(each[:int(size)].tolist())) for each, size in zip(texts, sizes, strict=True)]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value."""
        return self.all_gather_object(value if self.is_first else None)[0]

    # ---- tensors, in place

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Each tensor becomes the sum over all ranks. Allocates nothing in PyTorch's allocator."""
        if not self.joined:
            return
        by_kind: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.device.type, tensor.dtype), []).append(tensor)
        with lost_ranks():
            for (device, _), alike in by_kind.items():
                if device == "cuda" and self.gradients is not None:  # NCCL: one launch for all of them, without a copy
                    with dist.distributed_c10d._coalescing_manager(self.gradients):
                        for tensor in alike:
                            dist.all_reduce(tensor, group=self.gradients)
                else:  # gloo would copy coalesced tensors into a flat one
                    for tensor in alike:
                        dist.all_reduce(tensor)

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Each tensor becomes rank 0's."""
        if not self.joined:
            return
        with lost_ranks():
            for tensor in tensors:
                on_gpu = tensor.device.type == "cuda" and self.gradients is not None
                dist.broadcast(tensor, 0, group=self.gradients if on_gpu else None)

    # ---- work

    def share_of(self, count: int) -> tuple[int, int]:
        """(first, end) of this rank's part of `count` things, in order."""
        return count * self.rank // self.world, count * (self.rank + 1) // self.world

    def leave(self) -> None:
        """At the end of a run without an error."""
        if self.joined:
            dist.destroy_process_group()


ALONE = Ranks()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """LostRank for an error of a collective: gloo notices at once that the other end of a connection has closed."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise LostRank(f"Another rank has ended or cannot be reached ({reason}).") from error


# ---- joining

def join(config: RunConfig, stop_requested: Callable[[], bool],
         environment: Mapping[str, str] = os.environ) -> tuple[Ranks, str]:
    """(the ranks, the device of this one), from the variables that torchrun and training/launch.py set.

    Rank 0 keeps its standard output; the others' goes nowhere.
    """
    if config.ranks == 1:
        return Ranks(stop_requested=stop_requested), config.device
    rank, world, local = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = device_of(config, local)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # before anything else: else GPU 0 gets a CUDA context of every rank
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    try:
        store = store_of_this_start(rank, environment) if "TORCHELASTIC_RUN_ID" in environment else None
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=TIMEOUT, store=store)
    except (RuntimeError, ValueError) as error:
        raise unreachable(address, str(error)) from error
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return Ranks(rank, world, stop_requested, joined=True), device


def store_of_this_start(rank: int, environment: Mapping[str, str]) -> Store:
    """A store that rank 0 opens. torchrun keeps its own over restarts: there a rank may find the addresses of processes
    that have ended, and wait for them (seen with torch 2.13)."""
    torchruns, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
    host, key, ends = environment["MASTER_ADDR"], "fitgpt/port", time.monotonic() + TIMEOUT.total_seconds()
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        torchruns.set(key, str(store.port))
        return store
    while True:
        try:  # the port of an earlier start has closed with its rank 0
            store = TCPStore(host, int(torchruns.get(key)), wait_for_workers=False, timeout=CONNECT)
            store.set_timeout(TIMEOUT)
            return store
        except RuntimeError:
            if time.monotonic() > ends:
                raise
            time.sleep(RETRY_S)


def is_restarted(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun (--max-restarts) has restarted the ranks. Only the machine on which one failed counts it."""
    return any(ranks.all_gather_object(environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))


def device_of(config: RunConfig, local_rank: int) -> str:
    """The device of a rank, by its number on this machine."""
    if config.device in ("cpu", "mps") or config.gpus.endswith("xcpu"):
        return "cpu"
    numbered = "" if "x" in config.gpus else config.gpus.split(",")[local_rank]
    index = int(numbered or local_rank)
    visible = torch.cuda.device_count()
    if visible == 0:
        raise DeviceError(f"Rank {local_rank} on this machine needs a GPU, and torch sees none.",
                          "fitgpt doctor  says why; --device=cpu trains on CPUs, with gloo.")
    if visible == 1 and not numbered:  # a launcher that shows each rank its own GPU only
        return "cuda:0"
    if index >= visible:
        raise UsageError(f"More ranks than GPUs: rank {local_rank} on this machine would use GPU {index}, and torch "
                         f"sees {visible}.", f"torchrun --nproc-per-node={visible} …, or fitgpt train --gpus=all")
    return f"cuda:{index}"


def unreachable(address: str, message: str) -> SystemFault:
    first = message.strip().splitlines()[0]
    if "EADDRINUSE" in message or "address already in use" in message.lower():
        return SystemFault(f"Port in use: rank 0 cannot listen on {address}, because another program does.",
                           "torchrun --master-port=29511 …, or torchrun --standalone … on one machine")
    return SystemFault(f"The ranks did not find each other at {address}: {first}",
                       "Every machine must reach that address: check MASTER_ADDR, the firewall, and which network "
                       "interface to use: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0")


def check_alike(ranks: Ranks, config: RunConfig, device: str, dtype: str, data: str) -> None:
    """UsageError if the ranks differ in version, config or data, or if two use one GPU. `data`: its fingerprint."""
    if not ranks.joined:
        return
    shared = {key: value for key, value in config.to_dict().items() if key not in OF_ONE_RANK}
    gpu = ""
    if device.startswith("cuda") and config.backend == "nccl":
        # As NCCL tells GPUs apart: NCCL_HOSTID replaces the machine's name.
        gpu = f"{os.environ.get('NCCL_HOSTID') or node()} {torch.cuda.get_device_properties(device).uuid}"
    alike = {"version of fitgpt": __version__, "version of torch": torch.__version__, "dtype": dtype,
             "data": data[:12], "config": sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:12]}
    of_ranks = ranks.all_gather_object({"alike": alike, "config": shared, "gpu": gpu})
    for rank, other in enumerate(of_ranks):
        for what, first in of_ranks[0]["alike"].items():
            if other["alike"][what] != first:
                detail = f"{first} on rank 0 and {other['alike'][what]} on rank {rank}"
                if what == "config":
                    detail = ", ".join(f"{key}={of_ranks[0]['config'][key]!r} on rank 0 and {value!r} on rank {rank}"
                                       for key, value in other["config"].items() if of_ranks[0]["config"][key] != value)
                raise UsageError(f"The ranks differ in {what}: {detail}.",
                                 "Start all ranks with the same command, the same installation and the same data.")
    check_gpus([each["gpu"] for each in of_ranks])


def check_gpus(gpus: Sequence[str]) -> None:
    """UsageError if two ranks use one GPU, which NCCL does not support. Empty: not through NCCL."""
    for rank, gpu in enumerate(gpus):
        if gpu and gpu in gpus[:rank]:
            raise UsageError(f"Two ranks on one GPU: ranks {gpus.index(gpu)} and {rank} both use {gpu.split()[-1]}.",
                             "--gpus=all, or torchrun --nproc-per-node=gpu: one rank per GPU. CUDA_VISIBLE_DEVICES "
                             "must not show the same single GPU to all of them.")


def connect_gpus(ranks: Ranks, config: RunConfig, device: str) -> None:
    """Creates the communicator that adds up gradients on GPUs. NCCL allocates its buffers here, not in a step."""
    if not ranks.joined or not device.startswith("cuda") or config.backend == "gloo":
        return
    try:
        ranks.gradients = dist.new_group(backend="nccl", timeout=TIMEOUT, device_id=torch.device(device))
    except RuntimeError as error:
        raise DeviceError(f"NCCL could not connect the GPUs: {str(error).strip()}",
                          "NCCL_DEBUG=INFO fitgpt train …  shows where it fails; fitgpt explain reads the message; "
                          "--backend=gloo trains without NCCL, slower") from error


class UnwrittenRunFolder(RunFolder):
    """The run folder on the ranks that write nothing."""

    def __init__(self, path: str) -> None:
        self.path, self.checkpoints, self.notes = Path(path), Path(path) / "checkpoints", ()

    def check_ours(self) -> None:
        pass

    def record(self, config: Mapping[str, Any]) -> None:
        pass

    def append_metrics(self, row: Mapping[str, Any]) -> str:
        return ""

    def close(self) -> None:
        pass
