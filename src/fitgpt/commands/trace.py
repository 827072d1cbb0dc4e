"""`fitgpt trace`: a script, or a saved trace → a plan on the terminal, in JSON, for every GPU, or as a page."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

from ..config.command_options import TraceOptions
from ..core.errors import UsageError
from ..core.files import check_overwrite, is_own_page, write_over
from ..core.units import optional_bytes
from ..planning.budget import Target, several_gpus, target_for
from ..planning.plan import best_of
from ..planning.verdict import Verdict
from ..show import plan_text as show
from ..show.terminal import can_redraw, columns, paragraph
from ..tracing.plan import SCRIPT, plan_trace, verdicts
from ..tracing.script import trace_script
from ..tracing.trace_file import Trace, is_trace, read, to_save

SCHEMA = 2  # of the list of GPUs


def trace(options: TraceOptions) -> int:
    save, timeline = (Path(name) if name else None for name in (options.save, options.timeline))
    for path, flag, is_ours in ((save, "--save", is_trace), (timeline, "--timeline", is_own_page)):
        if path and not path.parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no folder {path.parent}.", f"{flag} {shlex.quote(path.name)}")
        if path:
            check_overwrite(path, is_ours, "trace", flag)
    if options.all_cards and (options.gpu or options.budget or timeline):
        raise UsageError("--all-cards plans for every GPU, and --gpu, --budget and --timeline for one.", "--all-cards")
    allocator = "" if options.allocator == "auto" else options.allocator
    target = None if options.all_cards else _target(options)
    traced = _trace_of(options)
    notes = sys.stderr if options.json else sys.stdout
    if target is None:
        verdict = _every_gpu(traced, options, allocator)
    else:
        found = plan_trace(traced, target, allocator)
        verdict = found.verdict
        if options.json:
            print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
        else:
            print(show.traced_text(found, columns(), colour=can_redraw() and not os.environ.get("NO_COLOR")), end="")
        if timeline:
            wrote = write_over(timeline, show.timeline_page(
                found, found.one_step(), " ".join(traced.command), "The traced optimizer step with the highest peak."))
            print(f"One step is drawn in {wrote}.", file=notes)
    if save:  # last: a trace may be too large for a file
        print(f"The trace is saved in {write_over(save, to_save(traced))}.", file=notes)
    return verdict.exit_code


def _target(options: TraceOptions) -> Target:
    if several := several_gpus(options.gpu):
        raise UsageError(f"--gpu {options.gpu} names several GPUs, and a trace is of one.",
                         f"--gpu {shlex.quote(several[0])}")
    try:
        return target_for(options.gpu, "auto", others=options.others, budget=options.budget)
    except UsageError:
        script = list(options.script)
        for number, each in enumerate(script):
            name, equals, _ = each.partition("=")
            if name in ("--gpu", "--budget") and not options.gpu and not options.budget:
                end = number + (1 if equals else 2)
                raise UsageError(
                    f"{name} stands after {script[0]}, so it is the script's: options of fitgpt come first.",
                    shlex.join(["fitgpt", "trace", *script[number:end], *script[:number], *script[end:]])) from None
        raise


def _trace_of(options: TraceOptions) -> Trace:
    """A saved trace is read; anything else is run."""
    first = options.script[0]
    if first.endswith(".json") or (os.path.isfile(first) and not first.endswith(".py") and len(options.script) == 1):
        if len(options.script) > 1:
            raise UsageError(f"{first} is a saved trace, and takes no arguments: {options.script[1]!r}.",
                             shlex.join(["fitgpt", "trace", "--gpu", options.gpu or "4070", first]))
        return read(first)
    return trace_script(options.script, gpu=options.gpu or ("h200" if options.all_cards else ""),
                        others=options.others, budget=options.budget, steps=options.steps, torch=options.torch)


def _every_gpu(traced: Trace, options: TraceOptions, allocator: str) -> Verdict:
    rows = verdicts(traced, optional_bytes(options.others, "MiB"), allocator)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "trainer": SCRIPT, "command": list(traced.command),
                          "not_seen": list(traced.not_seen), "gpus": [each.to_dict() for each in rows]},
                         indent=1, ensure_ascii=False))
    else:
        print(paragraph(show.traced_title(traced, ""), columns()), show.all_cards_table(rows, {}, 0, columns()),
              sep="\n\n", end="")
    return best_of(rows)
