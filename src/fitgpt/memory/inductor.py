"""How torch's compiler lays out the memory of a graph of kernels: their order, whose buffer another may take.

Four rules of Inductor, as recorded runs of torch 2.11 show them; the source of 2.13 has them too, but for the quirk:
- An output takes the place of an input that nobody reads any more, where its kernel may write there.
- Else it takes a spent buffer of the same kind and size, if the wait for it would not raise the estimated peak; the
  estimate takes what a graph hands out for freed at the start (the quirk), so that one which hands out much reuses
  little.
- Of buffers that are spent at once, the last by name is the first to be taken: buf89 before buf111.
- Kernels run in the order that is estimated to peak lowest (orders.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .kernels import Graph, Made
from .orders import ordered


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


def plan(graph: Graph) -> Plan:
    """What the compiled graph does to memory, in order."""
    kernels, last, usage = ordered(graph)
    peak = max(0, *usage)
    spent_after: dict[int, list[str]] = {}
    for name, at in last.items():
        if name not in graph.keeps and name not in graph.lent:
            spent_after.setdefault(at, []).append(name)
    for names in spent_after.values() if graph.numbers else ():
        names.sort(key=lambda name: str(graph.numbers[name]))
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
