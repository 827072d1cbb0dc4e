"""`fitgpt fit`: parse, call planning.fit, print the result, write a config, a plan and a page.

Neither torch nor numpy is loaded; with --measure, a child process loads them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..config.command_options import FitOptions
from ..config.fields import Assignment, shown
from ..config.optimizers import host_bytes
from ..core.errors import SystemFault, UsageError
from ..core.files import check_overwrite, disk_faults, is_own_page, write_over
from ..planning import plan_file
from ..planning.budget import Target
from ..planning.fallback_ladder import fallback_plans
from ..planning.fit import FitRequest, config_text, fit_from, fit_request, is_own_config, without_float_errors
from ..planning.fit_goals import FitResult
from ..planning.plan import plan_for
from ..show import fit_text as show
from ..show.terminal import columns


def fit(assignments: Sequence[Assignment]) -> int:
    request = fit_request(assignments)
    options, run = request.options, ", ".join(config_files(assignments)) or "the run"
    check_files(options)
    fitted = fit_from(request, lambda text: print(f"fitgpt: {text}", file=sys.stderr, flush=True))
    files, fault = list[str](), None
    try:
        files = write_files(fitted, request, run) if fitted.chosen is not None else []
    except SystemFault as error:  # the result is printed all the same
        fault = error
    if options.json:
        print(json.dumps({**show.fit_json(fitted, options.goal), "wrote": files}, indent=1, ensure_ascii=False))
    else:
        todo = next_step(fitted, options, assignments, files)
        print(show.fit_text(fitted, run, width=columns(), todo=todo), end="")
    if fault is not None:
        raise fault
    return fitted.verdict.exit_code


# ---- files


class OutputFiles(NamedTuple):
    """The files to write; None: not asked for."""

    config: Path | None
    plan: Path | None
    page: Path | None


def files_of(options: FitOptions) -> OutputFiles:
    """The plan is named after its config, so that one folder can have several of them."""
    out, page = Path(options.out), Path(options.html) if options.html else None
    if not options.out:
        return OutputFiles(None, None, page)
    if out.suffix not in (".py", ".json"):
        raise UsageError(f"-o {options.out}: a config that `train` takes ends in .py, a plan alone in .json.",
                         f"-o {shlex.quote(str(out / 'my_run.py' if out.is_dir() else out.with_suffix('.py')))}")
    if out.suffix == ".json":
        return OutputFiles(None, out, page)
    return OutputFiles(out, out.with_suffix(".plan.json"), page)


def check_files(options: FitOptions) -> None:
    """UsageError before the search, where a file that `fit` did not write would be replaced."""
    config, plan, page = files_of(options)
    if page is not None and page.absolute() in {each.absolute() for each in (config, plan) if each is not None}:
        raise UsageError(f"-o and --html both write {page}.", "--html page.html")
    if config:
        check_overwrite(config, is_own_config, "fit", "-o")
    if plan:
        check_overwrite(plan, plan_file.is_of_fit, "fit", "-o", config)
    if page:
        check_overwrite(page, is_own_page, "fit", "--html")


def write_files(fitted: FitResult, request: FitRequest, run: str) -> list[str]:
    """The files that were written, each with whether it replaced one."""
    assert fitted.chosen is not None  # only settings that fit are written
    config, plan, page = files_of(request.options)
    texts: dict[Path, str] = {}
    as_given = fitted.chosen._replace(config=without_float_errors(
        replace(fitted.chosen.config, vocab_size=request.given.vocab_size)))
    if config:
        texts[config] = config_text(fitted._replace(chosen=as_given), run)
    if plan:
        texts[plan] = plan_text(fitted._replace(chosen=as_given), request)
    if page:
        texts[page] = show.fit_page(fitted, run)
    for path in texts:
        with disk_faults("make the folder of", path):
            path.parent.mkdir(parents=True, exist_ok=True)
    return [write_over(path, text) for path, text in texts.items()]


def plan_text(fitted: FitResult, request: FitRequest) -> str:
    """The plan of the chosen settings, with its fallback plans."""
    assert fitted.chosen is not None
    target = request.target
    config = replace(fitted.chosen.config, vocab_size=request.config.vocab_size)
    plan = plan_for(config, Target(target.platform, target.budget, target.card))
    ram_left = None if target.host_bytes is None else max(target.host_bytes - host_bytes(config), 0)
    return plan_file.text_of_fit(
        plan_file.document(plan, target.platform.torch, plan.track_record, plan.step_seconds),
        fitted.chosen.config, target.budget,
        fallback_plans(config, target.platform, host_bytes=ram_left), show.speed_json(fitted.chosen))


# ---- text


def config_files(assignments: Sequence[Assignment]) -> list[str]:
    """The config files that were named."""
    named = (each.source.rpartition(":")[0] for each in assignments if not each.source.startswith("-"))
    return list(dict.fromkeys(file for file in named if file))


def next_step(fitted: FitResult, options: FitOptions, assignments: Sequence[Assignment],
              files: Sequence[str]) -> str:
    if fitted.chosen is None:
        lines = ["Nothing fits, so nothing was written."] if options.out or options.html else []
        lines += [f"This fits: {command_with(fitted.suggestions[0].flags, assignments)}"] if fitted.suggestions else []
        return "\n".join(lines)
    if options.out and not files:
        return ""
    if options.out:
        flag = "" if options.out.endswith(".py") else "--plan "
        last = f"To train it: fitgpt train {flag}{shlex.quote(options.out)}"
    else:
        last = f"To write this config: {command_with((), assignments)}"
    return "\n".join([*(f"Wrote {file}." for file in files), last])


def command_with(more: Sequence[str], assignments: Sequence[Assignment]) -> str:
    """The command that was typed, with more flags; a new flag replaces one of the same option."""
    given = [f"--{each.key}={each.value if isinstance(each.value, str) else shown(each.value)}" for each in assignments
             if each.source.startswith("-") and each.key not in ("out", "html", "json")]
    names = [flag.partition("=")[0] for flag in more]
    kept = [flag for flag in given if flag.partition("=")[0] not in names]
    return shlex.join(["fitgpt", "fit", *config_files(assignments), *kept, *more, "-o", "config/my_run.py"])
