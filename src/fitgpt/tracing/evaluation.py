"""Evaluation and generation that a script contains and its trace did not reach: one sentence each, with file and line.

Found in the source of the user's files that were loaded: `no_grad`, `inference_mode`, `.eval()`, and calls of methods
that evaluate or generate. They count in code that runs, and in functions that it refers to by name; not where a model
was called, or gradients were turned off, from their lines.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.units import show_bytes
from .recorder import EVALUATION, Recorder, is_users

WITHOUT_GRADIENTS = {"no_grad", "inference_mode"}
EVALUATES = {"generate", "evaluate", "predict", "validate"}  # methods of models and trainers
# Methods of tensors, modules and containers: they run no model.
KNOWN = {name for kind in (torch.Tensor, nn.Module, list, dict, set) for name in dir(kind)} - {"forward", "__call__"}
CALLED_BY_LIBRARIES = {"forward", "training_step", "validation_step", "test_step", "compute_loss", "prediction_step"}
# Functions that evaluate: of transformers' Trainer, and of Lightning's.
TRAINERS_LOOP, LIGHTNINGS_STEP = "evaluation_loop", "_evaluation_step"
FITGPT = str(Path(__file__).resolve().parents[1]) + os.sep
MOST_NAMED = 3
NOT_REACHED = ("Evaluation was not reached, and may need more memory than stated: {}. To trace it, let it run within "
               "the first {} steps, or raise --steps.")
TRAINER_EVALUATES = ("{} evaluates (eval_strategy={!r}, batches of {}), and the trace ended before it did. To trace "
                     "it: eval_strategy=\"steps\", eval_steps=2.")
BEFORE_TRAINING = ("Evaluation ran before the first optimizer step only. Later, with the optimizer's state, about {} "
                   "are allocated, more than was traced. To trace it, evaluate again within the first {} steps.")
LIGHTNING_EVALUATES = "{} runs a validation loop that the trace did not reach. To trace it: num_sanity_val_steps=2."


def not_reached(recorder: Recorder, others: Collection[str] = ()) -> list[str]:
    """What was not reached; a script that ran to its end has reached all that it would. `others`: modules that are not
    the script's."""
    found = [*_of_trainer(recorder), *_before_training(recorder)]
    names = [f"{_shown(each.file)}, line {each.line} ({each.what})" for each in _of_files(recorder, others)]
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        found.append(NOT_REACHED.format("; ".join(names[:MOST_NAMED]) + more, len(recorder.steps)))
    return found


def _shown(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


# ---- trainers of libraries, and evaluation that ran


def _of_trainer(recorder: Recorder) -> Iterator[str]:
    """A Trainer of transformers, or that of a LightningModule, that is to evaluate and has not done so."""
    trainer = recorder.trainer
    strategy = getattr(getattr(getattr(trainer, "args", None), "eval_strategy", None), "value", "no")
    if strategy != "no" and TRAINERS_LOOP not in recorder.functions:
        yield TRAINER_EVALUATES.format(f"{recorder.called_from}: {type(trainer).__name__}", strategy,
                                       trainer.args.per_device_eval_batch_size)
    if getattr(getattr(trainer, "trainer", None), "enable_validation", False) \
            and LIGHTNINGS_STEP not in recorder.functions:
        yield LIGHTNING_EVALUATES.format(recorder.called_from)


def _before_training(recorder: Recorder) -> Iterator[str]:
    """Evaluation that ran before the first optimizer step only. Later the optimizer's state is there, too."""
    first, last = recorder.steps[0], recorder.steps[-1]
    starts = [*recorder.phases, ("", recorder.length)]
    evaluations = [(start, end) for (name, start), (_, end) in pairwise(starts) if name == EVALUATION and end > start]
    if not evaluations or evaluations[-1][1] > first:
        return
    allocated = [0, *accumulate(0 if tensor is None else tensor.nbytes if alloc else -tensor.nbytes
                                for alloc, tensor in recorder.events)]  # before each event
    freed = max(max(allocated[start:end + 1]) - allocated[end] for start, end in evaluations)
    needs = allocated[last] + freed
    if needs > max(allocated):
        yield BEFORE_TRAINING.format(show_bytes(needs), len(recorder.steps))


# ---- the user's files


class Place(NamedTuple):
    file: str
    line: int
    what: str  # the function that it is in, or what evaluates


class Source:
    """A file that was loaded, in parts: its functions, and its top level."""

    def __init__(self, file: str, tree: ast.Module, is_script: bool) -> None:
        self.file, self.is_script = file, is_script
        self.modules = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree)
                        if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        self.parts: list[tuple[str, list[ast.AST]]] = []  # (function, or "" of the top level; its nodes)
        self._split("", tree.body)

    def _split(self, function: str, body: Iterable[ast.AST]) -> None:
        """Nodes by the innermost function that they are in."""
        nodes, waiting = list[ast.AST](), [*body][::-1]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and not self.is_script and "__name__" in ast.dump(node.test):
                continue
            nodes.append(node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._split(node.name, node.body)
                waiting += [node.args, *node.decorator_list]
            else:
                waiting += [*ast.iter_child_nodes(node)][::-1]
        self.parts.append((function, nodes))


def _of_files(recorder: Recorder, others: Collection[str]) -> list[Place]:
    modules = [module for name, module in list(sys.modules.items()) if name not in others]
    files = {recorder.script_file, *(getattr(module, "__file__", None) or "" for module in modules)}
    sources = [source for file in sorted(files) if (source := _read(recorder, file))]
    referred, bodies = set[str](), dict[str, list[list[ast.AST]]]()
    for source in sources:
        for function, nodes in source.parts:
            bodies.setdefault(function, []).append(nodes)
    waiting = [name for nodes in bodies.get("", []) for name in _names(nodes)]
    waiting += [name for name in bodies if name in CALLED_BY_LIBRARIES or name.startswith(("__", "on_"))]
    while waiting:
        if (name := waiting.pop()) not in referred:
            referred.add(name)
            waiting += [each for nodes in bodies.get(name, []) for each in _names(nodes)]
    found = [place for source in sources for function, nodes in source.parts
             if not function or function in referred
             for place in _unreached(source, function, nodes, bodies, referred, recorder)]
    return list({each.what: each for each in reversed(found)}.values())[::-1]


def _read(recorder: Recorder, file: str) -> Source | None:
    path = Path(recorder.folder, file)
    if not is_users(file) or str(path).startswith(FITGPT):
        return None
    try:
        return Source(file, ast.parse(path.read_bytes()), file == recorder.script_file)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What code refers to, by name: variables, and attributes such as methods."""
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _unreached(source: Source, function: str, nodes: Iterable[ast.AST], bodies: dict[str, list[list[ast.AST]]],
               referred: set[str], recorder: Recorder) -> Iterator[Place]:
    for node in nodes:
        evaluates, what, first = False, function, getattr(node, "lineno", 0)
        if isinstance(node, ast.With | ast.AsyncWith):
            evaluates = any(_name_of(item.context_expr) in WITHOUT_GRADIENTS for item in node.items) \
                and _runs_model(node.body, source, bodies, set())
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, what = min(each.lineno for each in (node, *node.decorator_list)), node.name
            evaluates = node.name in referred and any(_name_of(each) in WITHOUT_GRADIENTS for each in
                                                      node.decorator_list) \
                and _runs_model(node.body, source, bodies, set())
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            what = method if method in EVALUATES else function
            evaluates = (method == "eval" and not node.args) or \
                (method in EVALUATES and _root(node.func) not in source.modules
                 and not (method != "generate" and TRAINERS_LOOP in recorder.functions))
        if evaluates and not any((source.file, line) in recorder.lines for line in
                                 range(first, (getattr(node, "end_lineno", 0) or first) + 1)):
            yield Place(source.file, getattr(node, "lineno", 0), what or "without gradients")


def _runs_model(body: Iterable[ast.AST], source: Source, bodies: dict[str, list[list[ast.AST]]],
                seen: set[str]) -> bool:
    """Whether code may call a model: a variable or an attribute, here or in a function of the user's that it calls."""
    for call in (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)):
        name, is_method = _name_of(call), isinstance(call.func, ast.Attribute)
        if name in bodies:
            first_time = name not in seen
            seen.add(name)
            if first_time and any(_runs_model(nodes, source, bodies, seen) for nodes in bodies[name]):
                return True
        elif not (_root(call.func) in source.modules or (name in KNOWN if is_method else hasattr(builtins, name))):
            return True
    return False


def _name_of(node: ast.AST) -> str:
    """torch.no_grad() → no_grad."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _root(node: Any) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
