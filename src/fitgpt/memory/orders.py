"""In which order does torch's compiler run a graph's kernels? In the one of four that it estimates to peak lowest.

The four of torch/_inductor/memory.py: as the program has them; the one next that leaves least behind; first come, first
served; depth first. Of graphs without inputs of their own to free, the forward ones, only the first and the last have
ever peaked lowest: there every weight's cast could be next, which the others do too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from .kernels import Graph, Kernel


class Order(NamedTuple):
    kernels: Sequence[Kernel]
    last: dict[str, int]  # the number of the kernel after which a buffer is spent
    usage: list[int]      # the compiler's estimate of the bytes in use while each kernel runs


def ordered(graph: Graph) -> Order:
    """The first of those that peak alike."""
    orders = [graph.kernels, _depth_first(graph)]
    if graph.inputs:
        needs = _Needs(graph)
        orders[1:1] = [_leaving_least(graph, needs), _first_come(graph, needs)]
    return min((_estimated(graph, order) for order in orders), key=lambda each: max(0, *each.usage))


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


class _Needs:
    """By number of a kernel: which others it waits for, and which wait for it."""

    def __init__(self, graph: Graph) -> None:
        maker = {made[0]: at for at, kernel in enumerate(graph.kernels) for made in kernel.results}
        self.before = [{maker[name] for name in (*kernel.reads, kernel.after) if name in maker}
                       for kernel in graph.kernels]
        self.after: list[list[int]] = [[] for _ in graph.kernels]
        for at, before in enumerate(self.before):
            for each in before:
                self.after[each].append(at)


def _first_come(graph: Graph, needs: _Needs) -> list[Kernel]:
    """The kernel next whose needs were met earliest."""
    missing, turn, order = [len(before) for before in needs.before], dict[int, int](), list[Kernel]()
    could = [(list[int](), at) for at, count in enumerate(missing) if not count]
    heapify(could)
    while could:
        _, at = heappop(could)
        turn[at] = len(order)
        order.append(graph.kernels[at])
        for each in needs.after[at]:
            missing[each] -= 1
            if not missing[each]:
                heappush(could, (sorted(turn[before] for before in needs.before[each]), each))
    return order


def _leaving_least(graph: Graph, needs: _Needs) -> list[Kernel]:
    """Of the kernels that do not raise the peak so far, the one that adds least or frees most; if all do, the smallest.
    """
    nbytes = {made[0]: made[2] for kernel in graph.kernels for made in kernel.results} | dict(graph.inputs)
    reads = [[name for name in dict.fromkeys(kernel.reads) if name in nbytes] for kernel in graph.kernels]
    readers: dict[str, list[int]] = {name: [] for name in nbytes}
    for at, names in enumerate(reads):
        for name in names:
            readers[name].append(at)
    left = {name: len(those) + (name in graph.keeps) for name, those in readers.items()}  # until it is spent
    adds = [sum(made[2] for made in kernel.results) for kernel in graph.kernels]
    frees = [sum(nbytes[name] for name in names if left[name] == 1)
             + sum(made[2] for made in kernel.results if not left[made[0]])
             for kernel, names in zip(graph.kernels, reads, strict=True)]
    held = sum(graph.inputs.values())
    most = max(held, sum(nbytes.get(name, 0) for name in graph.keeps))
    missing, order = [len(before) for before in needs.before], list[Kernel]()
    could = {at for at, count in enumerate(missing) if not count}
    while could:
        room = most - held
        at = min(could, key=lambda each: (adds[each] if adds[each] > room else 0, adds[each] - frees[each], each))
        could.remove(at)
        order.append(graph.kernels[at])
        most = max(most, held + adds[at])
        held += adds[at] - frees[at]
        for each in needs.after[at]:
            missing[each] -= 1
            if not missing[each]:
                could.add(each)
        for name in reads[at]:
            left[name] -= 1
            if left[name] == 1:
                for each in readers[name]:
                    frees[each] += nbytes[name]
    return order


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
        for need in sorted({maker[name] for name in (*kernel.reads, kernel.after) if name in maker}, key=rank):
            if need not in seen:
                visit(need)
        order.append(kernel)

    for at in lightest_first:
        if at not in seen:
            visit(at)
    return order
