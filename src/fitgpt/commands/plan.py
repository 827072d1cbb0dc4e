"""`fitgpt plan`: what a run will use of GPU memory, and whether it fits. Never imports torch."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..config.fields import Assignment
from ..core.errors import UsageError
from ..core.files import check_overwrite, is_own_page, write_over
from ..core.units import optional_bytes
from ..hardware import gpus
from ..planning.forecast import one_step, replay_run
from ..planning.plan import best_of, expected_speed, plan_from, verdicts, with_training_length
from ..planning.request import PlanRequest, plan_request
from ..show import plan_text as show
from ..show.terminal import can_redraw, columns, paragraph

SCHEMA = 2  # of the list of GPUs; of a plan, see planning/plan_file.py


def plan(assignments: Sequence[Assignment]) -> int:
    request = plan_request(assignments)
    options = request.options
    if options.all_cards:
        return _every_gpu(request)
    timeline = Path(options.timeline) if options.timeline else None
    if timeline and not timeline.parent.is_dir():
        raise UsageError(f"--timeline {timeline}: there is no folder {timeline.parent}.",
                         f"--timeline {shlex.quote(timeline.name)}")
    if timeline:
        check_overwrite(timeline, is_own_page, "plan", "--timeline")
    found = plan_from(request)
    if options.json:
        print(json.dumps(found.to_dict(), indent=1, ensure_ascii=False))
    else:
        print(show.plan_text(found, columns(), colour=can_redraw() and not os.environ.get("NO_COLOR")), end="")
    if timeline:
        step = one_step(replay_run(found.run, found.target.platform, found.trainer))
        wrote = write_over(timeline, show.timeline_page(
            found, step, show.TRAINERS[found.trainer],
            "A few micro-batches, then the optimizer step; further micro-batches repeat the last."))
        print(f"One step is drawn in {wrote}.", file=sys.stderr if options.json else sys.stdout)
    return found.verdict.exit_code


def _every_gpu(request: PlanRequest) -> int:
    options = request.options
    clashes = [flag for flag, given in (("--gpu", options.gpu), ("--budget", options.budget),
                                        ("--options", options.options), ("--timeline", options.timeline),
                                        ("--hours", options.hours), ("--gpus", request.config.gpus)) if given]
    if clashes:
        raise UsageError(f"--all-cards plans for every GPU, and {' and '.join(clashes)} for one.",
                         "--all-cards")
    config, _ = with_training_length(request.config, options, request.data, request.missing, None)
    given = [each for each in (optional_bytes(options.others, "MiB"), optional_bytes(config.leave)) if each is not None]
    kept_free = sum(given) if given else None  # on any GPU
    rows = verdicts(config, options.trainer, kept_free, options.torch)
    planned = {each.name for each in rows if not each.problem}
    speeds = {card.name: (speed.low, speed.high) for card in gpus.load() if card.name in planned
              and (speed := expected_speed(config, card, options.trainer)) is not None}
    tokens = config.max_iters * config.tokens_per_step if options.tokens or options.epochs else 0
    hours = {name: {"hours": (tokens / high / 3600, tokens / low / 3600)} for name, (low, high) in speeds.items()
             if tokens}
    if options.json:
        print(json.dumps({"schema": SCHEMA, "trainer": options.trainer, "gpus": [
            {**each.to_dict(), "tokens_per_s": speeds.get(each.name), **hours.get(each.name, {})} for each in rows]},
            indent=1, ensure_ascii=False))
    else:
        title = show.run_title(config, options.trainer, config.gpt_config().count_params(), "",
                               vocab_assumed=request.vocab_assumed)
        print(paragraph(title, columns()),
              show.all_cards_table(rows, speeds, tokens, columns()), sep="\n\n", end="")
    return best_of(rows).exit_code
