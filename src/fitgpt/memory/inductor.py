"""How torch's compiler lays out the memory of a graph of kernels: their order, whose buffer another may take.

Three rules of Inductor, as recorded runs of torch 2.11 show them; the source of 2.13 has them too, but for the quirk:
- An output takes the place of an input that nobody reads any more, where its kernel may write there.
- Else it takes a spent buffer of the same kind and size, if the wait for it would not raise the estimated peak; the
  estimate takes what a graph hands out for freed at the start (the quirk), so that one which hands out much reuses
  little.
- Kernels run in the order of the program, or depth first where that is estimated to peak lower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
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
    within: int = 0                # bytes that exist only while it runs, and only in the estimate

    @property
    def results(self) -> tuple[Made, ...]:
        return self.makes + self.gets if self.gets else self.makes


class Step(NamedTuple):
    """One thing to do to memory: alloc, free, call or time; of a timing, `nbytes` is what the kernel overwrites."""

    do: str
    name: str
    owner: str = ""
    nbytes: int = 0


class Plan(NamedTuple):
    steps: list[Step]
    names: dict[str, str]   # what blocks that calls allocate are to be called, where another buffer ends up in them
    taken: dict[str, Made]  # blocks it was handed in which something ends up that it hands out

    def calling(self, blocks: Mapping[str, Made]) -> Plan:
        """The same, but blocks that it allocates go by the names of what they hold in the end."""
        return self._replace(steps=[
            step._replace(name=blocks[step.name].name, owner=step.owner and blocks[step.name].owner)
            if step.name in blocks else step for step in self.steps])


class Graph(NamedTuple):
    kernels: Sequence[Kernel]
    keeps: frozenset[str]             # what it hands out
    inputs: Mapping[str, int] = {}    # what it is handed and may free
    lent: frozenset[str] = frozenset()  # those of its inputs that are not its own to free


class Order(NamedTuple):
    kernels: Sequence[Kernel]
    last: dict[str, int]  # the number of the kernel after which a buffer is spent
    usage: list[int]      # the compiler's estimate of the bytes in use while each kernel runs


class GraphWriter:
    """Writes a graph, kernel by kernel."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.keeps = set[str]()

    def add(self, *makes: Made, reads: Sequence[str] = (), over: Mapping[str, Sequence[str]] | None = None,
            calls: str = "", gets: Sequence[Made] = (), timed: str = "", within: int = 0, keep: bool = False) -> str:
        """Returns the name of its first result; `keep`: whether the graph hands its results out."""
        kernel = Kernel(makes, tuple(reads), over or {}, calls, tuple(gets), timed, within)
        self.kernels.append(kernel)
        if keep:
            self.keeps.update(made.name for made in kernel.results)
        return kernel.results[0].name


def plan(graph: Graph) -> Plan:
    """What the compiled graph does to memory, in order."""
    kernels, last, usage = _ordered(graph)
    peak = max(0, *usage)
    spent_after: dict[int, list[str]] = {}
    for name, at in last.items():
        if name not in graph.keeps and name not in graph.lent:
            spent_after.setdefault(at, []).append(name)
    steps: list[Step | None] = []
    home = {name: name for name in graph.inputs}       # the block in which a buffer lies
    blocks = dict[str, Made]()                         # by the name of the first buffer in it
    spent: dict[tuple[str, int], list[tuple[str, int, int]]] = {}  # alike blocks: name, kernel, number of the free
    overwritten = set[str]()

    def place(made: Made, at: int, over: Sequence[str]) -> str:
        for name in over:
            before = blocks.get(home[name])
            same = (graph.inputs[name] == made.nbytes if before is None else
                    (before.kind, before.nbytes) == (made.kind, made.nbytes))
            if same and last[name] == at and name not in graph.keeps and name not in overwritten:
                overwritten.add(name)
                blocks.setdefault(home[name], made)
                return home[name]
        alike = spent.get((made.kind, made.nbytes), [])
        if alike:
            block, since, free = alike[-1]
            if since + 1 == at or made.nbytes + max(0, *usage[since + 1:at]) <= peak:
                alike.pop()
                steps[free] = None
                usage[since + 1:at] = [each + made.nbytes for each in usage[since + 1:at]]
                return block
        steps.append(Step("alloc", made.name, made.owner, made.nbytes))
        blocks[made.name] = made
        return made.name

    for at, kernel in enumerate(kernels):
        for made in kernel.makes:
            home[made.name] = place(made, at, kernel.over.get(made.name, ()))
        if kernel.calls:
            steps.append(Step("call", kernel.calls))
        for made in kernel.gets:
            home[made.name] = made.name
            blocks[made.name] = made
        if kernel.timed:
            clones = sum(made.nbytes for made in kernel.makes if kernel.over.get(made.name) and
                         home[made.name] != made.name)
            steps.append(Step("time", kernel.timed, nbytes=clones))
        for name in spent_after.get(at, []):
            if name in overwritten:
                continue
            steps.append(Step("free", home[name]))
            if name not in graph.inputs:
                found = blocks[home[name]]
                spent.setdefault((found.kind, found.nbytes), []).append((home[name], at, len(steps) - 1))
    return _renamed(graph, [step for step in steps if step], home)


def _renamed(graph: Graph, steps: list[Step], home: dict[str, str]) -> Plan:
    """A block goes by the name of what it holds in the end, if that is handed out."""
    made = {each.name: each for kernel in graph.kernels for each in kernel.results}
    final = {home[name]: made[name] for name in sorted(graph.keeps) if name in home and home[name] != name}
    called = {each.name for kernel in graph.kernels for each in kernel.gets}
    return Plan(steps, {block: held.name for block, held in final.items() if block in called},
                {block: held for block, held in final.items() if block in graph.inputs}).calling(final)


def _ordered(graph: Graph) -> Order:
    """The one of two orders that is estimated to peak lower: of the compiler's four orders, those that recorded runs
    have shown, the first where both peak alike."""
    return min((_estimated(graph, order) for order in (graph.kernels, _depth_first(graph))),
               key=lambda each: max(0, *each.usage))


def _estimated(graph: Graph, kernels: Sequence[Kernel]) -> Order:
    results = [kernel.results for kernel in kernels]
    last = {made[0]: at for at, each in enumerate(results) for made in each}
    last |= {name: at for at, kernel in enumerate(kernels) for name in kernel.reads}
    change = [0] * (len(kernels) + 1)
    for name, nbytes in graph.inputs.items():
        change[0] += nbytes
        change[last.get(name, -1) + 1] -= nbytes
    for at, kernel in enumerate(kernels):
        if kernel.within:
            change[at] += kernel.within
            change[at + 1] -= kernel.within
        for made in results[at]:
            name, nbytes = made[0], made[2]
            change[at] += nbytes
            change[0 if name in graph.keeps else last[name] + 1] -= nbytes
    return Order(kernels, last, list(accumulate(change)))


def _depth_first(graph: Graph) -> list[Kernel]:
    """The lightest kernel first, and before it what it needs, the lightest of it first; a mere call weighs nothing."""
    results = [kernel.results for kernel in graph.kernels]
    maker = {made[0]: at for at, each in enumerate(results) for made in each}
    nbytes = {made[0]: made[2] for each in results for made in each} | dict(graph.inputs)
    weights = [sum([made[2] for made in kernel.makes]) + sum([nbytes.get(name, 0) for name in kernel.reads])
               if kernel.makes else 0 for kernel in graph.kernels]
    lightest_first = sorted(range(len(weights)), key=weights.__getitem__)
    rank = dict(zip(lightest_first, range(len(weights)), strict=True)).__getitem__
    order: list[Kernel] = []
    seen = set[int]()

    def visit(at: int) -> None:
        seen.add(at)
        kernel = graph.kernels[at]
        for need in sorted({maker[name] for name in kernel.reads if name in maker}, key=rank):
            if need not in seen:
                visit(need)
        order.append(kernel)

    for at in lightest_first:
        if at not in seen:
            visit(at)
    return order
