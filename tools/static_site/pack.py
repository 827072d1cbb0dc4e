"""Runs in Pyodide: compiles fitgpt and what it uses of the standard library; computes the answers of the first page.

Compiled files save about a second at each start. Only what is used is shipped: every first visit loads it.
"""

import contextlib
import importlib
import json
import py_compile
import sys
import zipfile
from collections.abc import Iterable
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

SOURCE, OUT, ANSWERS = map(Path, sys.argv[1:])  # the folder of fitgpt, a folder for packed modules, and a file
FITGPT = SOURCE / "fitgpt"
NEED_TORCH = ["fitgpt.tracing.trace", "fitgpt.training"]  # named in __init__.py for type checkers
STDLIB = Path("/stdlib")
PASTED = ("CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 11.65 GiB of which 1.10 GiB "
          "is free.", "n_layer = 2\n", "python train.py --n_layer=2", "| 0  NVIDIA GeForce RTX 4070  Off |", "other")


def fitgpt_modules() -> tuple[set[Path], set[str]]:
    """The files that answers may import, in functions too, and the names of other modules that they import.
    tapes/shapes.py loads the engine by name."""
    finder = ModuleFinder([str(SOURCE)], excludes=NEED_TORCH)
    engine = [path.relative_to(SOURCE).with_suffix("") for path in (FITGPT / "engine").rglob("*.py")]
    for name in ("fitgpt.web.api", *(".".join(path.parts).removesuffix(".__init__") for path in engine)):
        finder.import_hook(name)
    return {Path(module.__file__) for module in finder.modules.values() if module.__file__}, set(finder.badmodules)


def data_files() -> Iterable[Path]:
    """Tables, and config files, which are read and not imported."""
    yield from (path for path in FITGPT.rglob("*") if path.suffix in (".csv", ".json") and "static" not in path.parts)
    yield from (FITGPT / "example_configs").glob("*.py")


def pack(target: Path, folder: Path, modules: Iterable[Path], data: Iterable[Path] = ()) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(modules):
            name = path.relative_to(folder).as_posix()
            compiled = py_compile.compile(str(path), "/tmp/compiled.pyc", dfile=name, doraise=True, optimize=2,
                                          invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
            packed.writestr(zipfile.ZipInfo(f"{name}c"), Path(compiled).read_bytes(), zipfile.ZIP_DEFLATED, 9)
        for path in sorted(data):
            packed.writestr(zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes(),
                            zipfile.ZIP_DEFLATED, 9)


def first_answers(api: Any) -> dict[str, Any]:
    """By name and query: every answer of a page whose address has no settings."""
    found: dict[str, Any] = {}

    def ask(name: str, query: str = "") -> Any:
        found[f"{name}?{query}" if query else name] = answer = api.answer(api.ApiRequest(name, query))
        assert "bug" not in answer, answer
        return answer

    first = urlencode({"gpu": ask("form")["example"]})
    for name in ("plan", "step", "exact", "gpus"):
        ask(name, first)
    for family in ask("fixes", first)["families"]:
        ask("fix", f"{urlencode({'family': family})}&{first}")
    found["form"]["has_docs"] = True  # build.py copies them
    return found


def stdlib_modules(imported: Iterable[str]) -> set[Path]:
    """The files of the standard library that were loaded, after all that fitgpt imports anywhere."""
    for name in imported:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    inside = [file.partition("/python314.zip/")[2] for file in files]
    return {STDLIB / file for file in inside if file}


modules, imported = fitgpt_modules()
pack(OUT / "fitgpt.zip", SOURCE, modules, data_files())

sys.path.append(str(SOURCE))
api = importlib.import_module("fitgpt.web.api")
ANSWERS.write_text(json.dumps(first_answers(api)))
for text in PASTED:
    api.answer(api.ApiRequest("paste", None, text))
api.answer(api.ApiRequest("fit", "gpu=RTX+4070&n_layer=1&goal=fastest"))

with zipfile.ZipFile("/lib/python314.zip") as whole:
    whole.extractall(STDLIB)
pack(OUT / "python_stdlib.zip", STDLIB, stdlib_modules(imported))
