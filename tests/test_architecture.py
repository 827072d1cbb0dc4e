"""The architecture, read from the import statements: packages on levels, and torch only where it is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fitgpt
from tests.helpers import write_dataset

ROOT = Path(fitgpt.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the bottom up: a package imports packages below it. Packages on one level do not import each other.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("hardware", "memory"),
    ("config",),
    ("data", "runs"),
    ("tapes", "engine"),
    ("planning",),
    ("tracing",),
    ("diagnosis",),
    ("show",),
    ("training", "web"),
    ("commands",),
    ("__main__",),
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# A plan, a fit and a diagnosis print themselves: inside __str__ and __repr__ they import what shows them.
PRINTS_ITSELF = {("planning.plan", "show"), ("planning.fit_goals", "show"), ("tracing.plan", "show"),
                  ("diagnosis.diagnose", "show")}

# Packages from outside the standard library: who may import them at once, and who only inside a function.
AT_ONCE = {
    "engine": {"torch", "numpy", "safetensors"},
    "data": {"numpy"},
    "tracing": {"torch"},
    "training": {"torch", "numpy", "safetensors"},
}
WHEN_CALLED = {
    "hardware": {"pynvml", "torch"},
    "engine": {"triton", "bitsandbytes", "huggingface_hub"},
    "data": {"rich", "tiktoken", "pyarrow", "datasets"},
    "show": {"rich"},
    "tracing": {"safetensors", "transformers", "triton"},
    "commands": {"torch"},
    "planning": {"torch"},
    "web": {"starlette", "uvicorn"},
}
# Imported inside functions only, so that what they import counts as imported there.
LATE = {"engine.kernels", "web.app"}


class Import(NamedTuple):
    module: str   # "engine.loop"
    target: str   # "errors" of ours, or "torch"
    ours: bool
    at_once: bool  # when the module itself is imported
    line: int
    for_types: bool = False

    @property
    def part(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module} line {self.line}: imports {self.target}"


def module_name(file: Path) -> str:
    """'engine.loop'; a folder's __init__ is the folder."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(file) for file in FILES}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(file: Path) -> list[Import]:
    module = module_name(file)
    is_package = file.name == "__init__.py"
    package = [] if module == "__init__" else module.split(".") if is_package else module.split(".")[:-1]

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif node.level == 0:
            yield node.module or "", False
        else:
            base = package[:len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            for alias in node.names:  # `from . import weights` is a module, `from .errors import FitError` is not
                named = ".".join([*base, alias.name])
                yield (named if named in MODULES else ".".join(base) or "__init__"), True

    def walk(node: ast.AST, at_once: bool, for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            typing = for_types or is_for_types(child)
            later = typing or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from (Import(module, name, ours, at_once, child.lineno, for_types)
                            for name, ours in targets(child))
            else:
                yield from walk(child, at_once and not later, typing)

    return list(walk(parsed(file), True, False))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def imports() -> list[Import]:
    return [each for file in FILES for each in imports_of(file)]


def inner() -> list[Import]:
    return [each for each in imports() if each.ours and "__init__" not in (each.module, each.target)]


def outer() -> list[Import]:
    return [each for each in imports() if not each.ours
            and each.target.partition(".")[0] not in {*sys.stdlib_module_names, "__future__"}]


def test_the_top_level_has_packages_only() -> None:
    loose = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert loose == {"__init__.py", "__main__.py", "py.typed"}
    assert {module.partition(".")[0] for module in MODULES} - {"", "__init__"} == set(LEVEL_OF)


def test_no_package_is_named_like_a_public_function() -> None:
    assert not set(fitgpt.__all__) & set(LEVEL_OF)


def test_the_docs_show_every_package_on_its_level() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = page.partition("## Imports point one way")[2].split("```")[1].removeprefix("text").split("↑")
    parts_drawn = [{word for word in level.replace("|", " ").split() if word in LEVEL_OF} for level in drawn]
    assert parts_drawn == [set(parts) for parts in LEVELS[:-1]]


def test_every_form_of_import_is_seen() -> None:
    """Known imports of each form, so that the tests below cannot pass by seeing nothing."""
    seen = {(each.module, each.target, each.at_once) for each in imports()}
    assert {("training.build", "engine.weights", True), ("training.run", "training.checkpoint", True),
            ("training.run", "torch", True), ("training.worker", "torch", False),
            ("planning.plan", "show.plan_text", False)} <= seen


def test_packages_import_only_packages_below_them() -> None:
    def wrong(each: Import) -> bool:
        target = each.target.partition(".")[0]
        if each.part == target or ((each.module, target) in PRINTS_ITSELF and not each.at_once):
            return False
        return LEVEL_OF[target] >= LEVEL_OF[each.part]

    assert [str(each) for each in inner() if wrong(each)] == []


def test_memory_imports_only_core() -> None:
    assert {each.target.partition(".")[0] for each in inner() if each.part == "memory"} == {"memory", "core"}


def test_no_class_name_is_used_twice() -> None:
    defined: dict[str, list[str]] = {}
    for file in FILES:
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(module_name(file))
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}


def test_imports_never_go_in_a_circle() -> None:
    """Nor do those inside functions hide one: they are there to load what is slow only where it is needed."""
    arrows: dict[str, set[str]] = {}
    for each in inner():
        if not each.for_types:
            arrows.setdefault(each.module, set()).add(each.target)
    while leaves := set().union(*arrows.values()) - arrows.keys() if arrows else set():
        arrows = {module: targets - leaves for module, targets in arrows.items()}
        arrows = {module: targets for module, targets in arrows.items() if targets}
    assert arrows == {}  # what is left has no end: a circle, and whatever leads to it


def test_each_package_imports_only_the_dependencies_it_may() -> None:
    def wrong(each: Import) -> bool:
        package, at_once = each.target.partition(".")[0], AT_ONCE.get(each.part, set())
        strict = each.at_once and each.module not in LATE
        return package not in (at_once if strict else at_once | WHEN_CALLED.get(each.part, set()))

    assert [str(each) for each in outer() if wrong(each)] == []
    assert [str(each) for each in inner() if each.at_once and each.target in LATE] == []


@pytest.mark.parametrize("call", [
    "fitgpt.commands.main.main(['--help'])",
    "fitgpt.commands.main.main(['train', '--help'])",
    "fitgpt.commands.main.main(['train', '--no_such_option=1'])",
    "fitgpt.data.shards.summarise(sys.argv[1])",
    "fitgpt.planning.request.training_config([fitgpt.config.fields.Assignment('dataset', sys.argv[1], '')])",
])
def test_help_config_and_data_headers_need_neither_torch_nor_numpy(tmp_path: Path, call: str) -> None:
    script = ("import sys, fitgpt.planning.request, fitgpt.commands.main, fitgpt.data.shards\n"
              f"import fitgpt.training.supervisor\n{call}\n"
              "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, write_dataset(tmp_path)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_importing_fitgpt_does_not_import_torch() -> None:
    script = ("import sys, fitgpt\nassert 'torch' not in sys.modules\nfitgpt.GPTConfig\n"
              "assert 'torch' not in sys.modules\nfitgpt.GPT\nassert 'torch' in sys.modules")
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# The code that torch's compiler writes for a traced script, which is executed as torch would.
RUNS_COMPILED_CODE = 'exec(compile(text, "<compiled>", "exec"), module)'


def test_no_module_executes_or_unpickles_files() -> None:
    forbidden = re.compile(r"(?<![\w.])(exec|eval)\(|pickle\.loads?\(|\bcPickle\b|weights_only=False")
    assert [f"{module_name(file)} line {number}" for file in FILES
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
            if forbidden.search(line) and RUNS_COMPILED_CODE not in line] == []
