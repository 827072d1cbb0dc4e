"""How torch.compile's Inductor lays out the memory of a graph of kernels: their order, and which buffers it reuses.

A `KernelGraph` goes in, a `BufferPlan` comes out: allocations, frees and calls in order. The rules are those that
recorded runs of torch 2.11 show; the source of 2.13 has them too, except the quirk:
- An output is written in place of an input that no later kernel reads, where its kernel allows that.
- Otherwise it reuses a freed buffer of the same dtype and size, if keeping that one until now does not raise the
  estimated peak. The estimate counts a graph's outputs as freed at the start (the quirk), so a graph with large outputs
  reuses little.
- Of buffers that are freed at once, the last by name is reused first, and names compare as text: buf89 after buf111.
- Kernels run in the order whose estimated peak is lowest, of the four orders of torch/_inductor/memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

# ---- the graph, and how to write one


class Buffer(NamedTuple):
    """A tensor of the graph. Buffers of one `dtype` and size can replace each other."""

    name: str
    owner: str
    nbytes: int
    dtype: str


class GraphKernel(NamedTuple):
    """A generated kernel, an ATen op that it calls, or the first followed by the second."""

    outputs: tuple[Buffer, ...]
    reads: tuple[str, ...] = ()
    inplace: Mapping[str, Sequence[str]] = {}  # outputs, and inputs they may overwrite
    calls: str = ""                 # the ATen op …
    returns: tuple[Buffer, ...] = ()  # … and what it allocates itself
    timed: str = ""                 # names its code, if variants of it are timed at its first run
    after: str = ""                 # a buffer whose kernel writes into what this one reads
    scratch: int = 0                # bytes that exist only while it runs, and only in the estimate

    @property
    def results(self) -> tuple[Buffer, ...]:
        return self.outputs + self.returns


class KernelGraph(NamedTuple):
    kernels: Sequence[GraphKernel]
    outputs: frozenset[str]
    inputs: Mapping[str, int] = {}        # name and bytes of inputs that it may free
    borrowed: frozenset[str] = frozenset()  # inputs that it may not free
    numbers: Mapping[str, int] = {}       # Inductor's numbers of buffers, where their order matters: 12 is buf12


class GraphWriter:
    """Writes a graph, kernel by kernel."""

    def __init__(self) -> None:
        self.kernels: list[GraphKernel] = []
        self.outputs = set[str]()
        self.numbers = dict[str, int]()
        self.numbered = 0

    def add(self, *outputs: Buffer, reads: Sequence[str] = (), inplace: Mapping[str, Sequence[str]] | None = None,
            calls: str = "", returns: Sequence[Buffer] = (), timed: str = "", after: str = "", scratch: int = 0,
            output: bool = False, virtual: int = 0) -> str:
        """Adds a kernel and returns the name of its first result. `output`: whether the graph returns its results;
        `virtual`: buffers that Inductor numbers before these results and never allocates."""
        kernel = GraphKernel(outputs, tuple(reads), inplace or {}, calls, tuple(returns), timed, after, scratch)
        self.kernels.append(kernel)
        self.numbers.update({made.name: number for number, made in enumerate(kernel.results, self.numbered + virtual)})
        self.numbered += virtual + len(kernel.results)
        if output:
            self.outputs.update(made.name for made in kernel.results)
        return kernel.results[0].name


# ---- the plan


class PlanStep(NamedTuple):
    """One step of compiled code: alloc, free, call or time. A timing's `nbytes` is what the kernel overwrites."""

    do: str
    name: str
    owner: str = ""
    nbytes: int = 0


class BufferPlan(NamedTuple):
    steps: list[PlanStep]
    names: dict[str, str]      # blocks that calls allocate: the name of the graph's output that ends up there
    taken: dict[str, Buffer]   # blocks of inputs: the graph's output that ends up there

    def renamed(self, blocks: Mapping[str, Buffer]) -> BufferPlan:
        """The same plan, with allocated blocks named and owned by what they hold in the end."""
        return self._replace(steps=[
            step._replace(name=blocks[step.name].name, owner=step.owner and blocks[step.name].owner)
            if step.name in blocks else step for step in self.steps])


def plan_buffers(graph: KernelGraph) -> BufferPlan:
    """What the compiled graph allocates, frees, calls and times, in order."""
    kernels, last_use, usage = schedule(graph)
    peak = max(0, *usage)
    freed_after: dict[int, list[str]] = {}  # by kernel
    for name, at in last_use.items():
        if name not in graph.outputs and name not in graph.borrowed:
            freed_after.setdefault(at, []).append(name)
    for names in freed_after.values() if graph.numbers else ():
        names.sort(key=lambda name: str(graph.numbers[name]))
    steps: list[PlanStep | None] = []
    block_of = {name: name for name in graph.inputs}   # the block in which a buffer lies
    blocks = dict[str, Buffer]()                       # by the name of the first buffer in it
    freed: dict[tuple[str, int], list[tuple[str, int, int]]] = {}  # by dtype and size: block, kernel, step of the free
    overwritten = set[str]()

    def place(buffer: Buffer, at: int, inplace: Sequence[str]) -> str:
        """The block for an output of kernel `at`: an input's, a freed one, or a new one."""
        for name in inplace:
            before = blocks.get(block_of[name])
            same = (graph.inputs[name] == buffer.nbytes if before is None else
                    (before.dtype, before.nbytes) == (buffer.dtype, buffer.nbytes))
            if same and last_use[name] == at and name not in graph.outputs and name not in overwritten:
                overwritten.add(name)
                blocks.setdefault(block_of[name], buffer)
                return block_of[name]
        alike = freed.get((buffer.dtype, buffer.nbytes), [])
        if alike:
            block, since, free = alike[-1]
            if since + 1 == at or buffer.nbytes + max(0, *usage[since + 1:at]) <= peak:
                alike.pop()
                steps[free] = None
                usage[since + 1:at] = [each + buffer.nbytes for each in usage[since + 1:at]]
                return block
        steps.append(PlanStep("alloc", buffer.name, buffer.owner, buffer.nbytes))
        blocks[buffer.name] = buffer
        return buffer.name

    for at, kernel in enumerate(kernels):
        for buffer in kernel.outputs:
            block_of[buffer.name] = place(buffer, at, kernel.inplace.get(buffer.name, ()))
        if kernel.calls:
            steps.append(PlanStep("call", kernel.calls))
        for buffer in kernel.returns:
            block_of[buffer.name] = buffer.name
            blocks[buffer.name] = buffer
        if kernel.timed:
            cloned = sum(buffer.nbytes for buffer in kernel.outputs if kernel.inplace.get(buffer.name) and
                         block_of[buffer.name] != buffer.name)
            steps.append(PlanStep("time", kernel.timed, nbytes=cloned))
        for name in freed_after.get(at, []):
            if name in overwritten:
                continue
            steps.append(PlanStep("free", block_of[name]))
            if name not in graph.inputs:
                found = blocks[block_of[name]]
                freed.setdefault((found.dtype, found.nbytes), []).append((block_of[name], at, len(steps) - 1))

    # Each block that ends up holding an output of the graph is named after that output.
    results = {buffer.name: buffer for kernel in graph.kernels for buffer in kernel.results}
    final = {block_of[name]: results[name] for name in sorted(graph.outputs)
             if name in block_of and block_of[name] != name}
    returned = {buffer.name for kernel in graph.kernels for buffer in kernel.returns}
    return BufferPlan([step for step in steps if step],
                      {block: held.name for block, held in final.items() if block in returned},
                      {block: held for block, held in final.items() if block in graph.inputs}).renamed(final)


# ---- the order of kernels: torch/_inductor/memory.py


class Schedule(NamedTuple):
    kernels: Sequence[GraphKernel]
    last_use: dict[str, int]  # by buffer: the kernel after which it is free
    usage: list[int]          # Inductor's estimate of the bytes in use while each kernel runs


def schedule(graph: KernelGraph) -> Schedule:
    """The order of kernels whose estimated peak is lowest; the first of those that are equal.

    Graphs without inputs to free are forward graphs. Of those only the program's order and depth-first have ever peaked
    lowest: every weight's cast could run next, and the other two orders run them too early.
    """
    orders = [graph.kernels, _depth_first_order(graph)]
    if graph.inputs:
        orders[1:1] = [_least_memory_order(graph), _breadth_first_order(graph)]
    return min((_estimate(graph, order) for order in orders), key=lambda each: max(0, *each.usage))


def _estimate(graph: KernelGraph, kernels: Sequence[GraphKernel]) -> Schedule:
    last_use = {buffer.name: at for at, kernel in enumerate(kernels) for buffer in kernel.results}
    last_use |= {name: at for at, kernel in enumerate(kernels) for name in kernel.reads}
    change = [0] * (len(kernels) + 1)
    for name, nbytes in graph.inputs.items():
        change[0] += nbytes
        change[last_use.get(name, -1) + 1] -= nbytes
    for at, kernel in enumerate(kernels):
        change[at] += kernel.scratch
        change[at + 1] -= kernel.scratch
        for buffer in kernel.results:
            change[at] += buffer.nbytes
            change[0 if buffer.name in graph.outputs else last_use[buffer.name] + 1] -= buffer.nbytes
    return Schedule(kernels, last_use, list(accumulate(change)))


def _dependencies(graph: KernelGraph) -> tuple[list[set[int]], list[list[int]]]:
    """By number of a kernel: which others it waits for, and which wait for it."""
    maker = {buffer.name: at for at, kernel in enumerate(graph.kernels) for buffer in kernel.results}
    before = [{maker[name] for name in (*kernel.reads, kernel.after) if name in maker} for kernel in graph.kernels]
    after: list[list[int]] = [[] for _ in graph.kernels]
    for at, needed in enumerate(before):
        for each in needed:
            after[each].append(at)
    return before, after


def _breadth_first_order(graph: KernelGraph) -> list[GraphKernel]:
    """topological_sort_bfs: next is the kernel that became ready first."""
    before, after = _dependencies(graph)
    missing = [len(needed) for needed in before]
    position, order = dict[int, int](), list[GraphKernel]()
    ready = [(list[int](), at) for at, count in enumerate(missing) if not count]
    heapify(ready)
    while ready:
        _, at = heappop(ready)
        position[at] = len(order)
        order.append(graph.kernels[at])
        for each in after[at]:
            missing[each] -= 1
            if not missing[each]:
                heappush(ready, (sorted(position[needed] for needed in before[each]), each))
    return order


def _least_memory_order(graph: KernelGraph) -> list[GraphKernel]:
    """topological_sort_lpmf: of the ready kernels that do not raise the peak so far, the one that adds least or frees
    most; if all raise it, the smallest."""
    before, after = _dependencies(graph)
    nbytes = {buffer.name: buffer.nbytes for kernel in graph.kernels for buffer in kernel.results} | dict(graph.inputs)
    reads = [[name for name in dict.fromkeys(kernel.reads) if name in nbytes] for kernel in graph.kernels]
    readers: dict[str, list[int]] = {name: [] for name in nbytes}
    for at, names in enumerate(reads):
        for name in names:
            readers[name].append(at)
    uses = {name: len(those) + (name in graph.outputs) for name, those in readers.items()}  # left before it is freed
    adds = [sum(buffer.nbytes for buffer in kernel.results) for kernel in graph.kernels]
    frees = [sum(nbytes[name] for name in names if uses[name] == 1)
             + sum(buffer.nbytes for buffer in kernel.results if not uses[buffer.name])
             for kernel, names in zip(graph.kernels, reads, strict=True)]
    held = sum(graph.inputs.values())
    peak = max(held, sum(nbytes.get(name, 0) for name in graph.outputs))
    missing, order = [len(needed) for needed in before], list[GraphKernel]()
    ready = {at for at, count in enumerate(missing) if not count}
    while ready:
        room = peak - held
        at = min(ready, key=lambda each: (adds[each] if adds[each] > room else 0, adds[each] - frees[each], each))
        ready.remove(at)
        order.append(graph.kernels[at])
        peak = max(peak, held + adds[at])
        held += adds[at] - frees[at]
        for each in after[at]:
            missing[each] -= 1
            if not missing[each]:
                ready.add(each)
        for name in reads[at]:
            uses[name] -= 1
            if uses[name] == 1:
                for each in readers[name]:
                    frees[each] += nbytes[name]
    return order


def _depth_first_order(graph: KernelGraph) -> list[GraphKernel]:
    """topological_sort_dfs: the kernel with the smallest buffers first, preceded by what it needs, smallest first.

    A kernel that only calls an ATen op counts as 0 bytes.
    """
    before, _ = _dependencies(graph)
    nbytes = {buffer.name: buffer.nbytes for kernel in graph.kernels for buffer in kernel.results} | dict(graph.inputs)
    sizes = [sum(buffer.nbytes for buffer in kernel.outputs) + sum(nbytes.get(name, 0) for name in kernel.reads)
             if kernel.outputs else 0 for kernel in graph.kernels]
    order: list[GraphKernel] = []
    seen = set[int]()

    def visit(at: int) -> None:
        seen.add(at)
        for needed in sorted(before[at], key=lambda each: (sizes[each], each)):
            if needed not in seen:
                visit(needed)
        order.append(graph.kernels[at])

    for at in sorted(range(len(sizes)), key=lambda each: (sizes[each], each)):
        if at not in seen:
            visit(at)
    return order
