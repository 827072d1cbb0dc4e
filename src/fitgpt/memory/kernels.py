"""A graph of kernels as torch's compiler has it, and the pen that writes one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Made(NamedTuple):
    """A buffer, as the kernel that makes it sees it; buffers of one `kind` and size are alike."""

    name: str
    owner: str
    nbytes: int
    kind: str


class Kernel(NamedTuple):
    makes: tuple[Made, ...]
    reads: tuple[str, ...] = ()
    over: Mapping[str, Sequence[str]] = {}  # outputs, and inputs they may overwrite
    calls: str = ""                # an op of torch's that it is, or that comes after it …
    gets: tuple[Made, ...] = ()    # … and what that one allocates itself
    timed: str = ""                # names its code, if variants of it are timed when it first runs
    after: str = ""                # made by a kernel that writes into what this one reads
    within: int = 0                # bytes that exist only while it runs, and only in the estimate

    @property
    def results(self) -> tuple[Made, ...]:
        return self.makes + self.gets if self.gets else self.makes


class Graph(NamedTuple):
    kernels: Sequence[Kernel]
    keeps: frozenset[str]             # what it hands out
    inputs: Mapping[str, int] = {}    # what it is handed and may free
    lent: frozenset[str] = frozenset()  # those of its inputs that are not its own to free
    numbers: Mapping[str, int] = {}   # by which the compiler calls its buffers, where they matter: 12 is buf12


class GraphWriter:
    """Writes a graph, kernel by kernel."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.keeps = set[str]()
        self.numbers = dict[str, int]()
        self.numbered = 0

    def add(self, *makes: Made, reads: Sequence[str] = (), over: Mapping[str, Sequence[str]] | None = None,
            calls: str = "", gets: Sequence[Made] = (), timed: str = "", after: str = "", within: int = 0,
            keep: bool = False, unseen: int = 0) -> str:
        """Returns the name of its first result; `keep`: whether the graph hands its results out; `unseen`: how many
        buffers the compiler counts besides, and never makes."""
        kernel = Kernel(makes, tuple(reads), over or {}, calls, tuple(gets), timed, after, within)
        self.kernels.append(kernel)
        self.numbers.update({made.name: number for number, made in enumerate(kernel.results, self.numbered + unseen)})
        self.numbered += unseen + len(kernel.results)
        if keep:
            self.keeps.update(made.name for made in kernel.results)
        return kernel.results[0].name
