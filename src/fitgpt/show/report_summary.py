"""A RunRecord → what a report says about it: a verdict, key figures, the command that reproduces the run, and a CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from ..config.fields import option_specs, shown
from ..config.run_config import RunConfig
from ..core.units import show_bytes, show_count, show_seconds
from ..runs.metrics import Evaluation, SplitLoss, StepReport
from ..runs.record import RunRecord
from .progress import show_mfu

STILL_FALLING = 0.005    # relative: a validation loss that fell by less since the evaluation before is nearly flat
MAX_CSV_STEPS = 2000     # per run; of more, every n-th is written
NOT_REPEATED = {"out_dir", "plan", "fit", "wait"}  # options that only concern how the run was started
NOT_EVALUATED = "not evaluated yet"


# ---- as text


def verdict(record: RunRecord) -> str:
    """Whether the run is finished, its best evaluation, whether the loss was still falling, memory against the plan."""
    return " ".join(sentence for sentence in (_progress(record), _loss(record), _memory(record)) if sentence)


def _progress(record: RunRecord) -> str:
    total, done = record.facts.max_iters if record.facts else 0, steps_done(record)
    if not total:
        return ""
    if done >= total:
        return f"Finished: all {total:,} steps."
    return f"{'Running' if record.running else 'Not finished'}: {done:,} of {total:,} steps."


def _loss(record: RunRecord) -> str:
    evaluated = validation_losses(record)
    if not evaluated:
        return "No validation loss yet."
    place = min(range(len(evaluated)), key=lambda index: evaluated[index][1].mean)
    (step, best), since = evaluated[place], len(evaluated) - 1 - place
    if since:
        text = (f"Best validation loss {best.mean:.4f} at step {step:,}; it has not improved in the "
                f"{f'{since:,} evaluations' if since > 1 else 'evaluation'} since")
        trained = [loss.mean for each in record.evaluations if each.step >= step and (loss := loss_of(each, "train"))]
        overfits = len(trained) > 1 and trained[-1] < trained[0]
        return text + (", while the training loss fell: the model overfits." if overfits else ".")
    if place == 0:
        return f"Validation loss {best.mean:.4f} at step {step:,}, the only evaluation."
    before = evaluated[place - 1][1].mean
    falling = "was still falling" if before - best.mean >= STILL_FALLING * abs(before) else "was nearly flat"
    return (f"Best validation loss {best.mean:.4f} at step {step:,}, the last evaluation: it {falling} "
            f"({best.mean - before:+.4f} since the one before).")


def _memory(record: RunRecord) -> str:
    measured, planned = measured_peak(record), planned_peak(record)
    if not measured:
        return ""
    text = f"Peak memory {show_bytes(measured)} reserved"
    if not planned:
        return f"{text}."
    if measured == planned:
        return f"{text}, exactly as planned."
    side = "under" if measured < planned else "over"
    return f"{text}, {show_bytes(abs(measured - planned))} {side} the plan of {show_bytes(planned)}."


# ---- figures


def readings(record: RunRecord) -> dict[str, tuple[str, str]]:
    """Name → (figure, what belongs to it). What the device does not measure is left out."""
    facts, steps = record.facts, record.steps
    found = {"best validation loss": ("–", NOT_EVALUATED), "last training loss": ("–", "no step yet")}

    evaluated = validation_losses(record)
    if evaluated:
        step, best = min(evaluated, key=lambda each: each[1].mean)
        error = f"± {best.stderr:.4f}, " if math.isfinite(best.stderr) else ""
        found["best validation loss"] = f"{best.mean:.4f}", f"{error}block {best.block:,}, step {step:,}"
        # A loss is in nats per token, and with the tokenizer `bytes` a token is a byte.
        bits = f"{best.mean / math.log(2):.4f} bits per byte" if facts and facts.tokenizer == "bytes" else "per token"
        found["perplexity"] = f"{math.exp(min(best.mean, 700.0)):.4g}", bits
    if steps:
        found["last training loss"] = f"{steps[-1].loss:.4f}", f"at step {steps[-1].step:,}"

    done = steps_done(record)
    more = [f"of {facts.max_iters:,}" if facts and facts.max_iters else "",
            f"{show_count(done * facts.tokens_per_step)} tokens" if facts and facts.tokens_per_step else ""]
    found["steps"] = f"{done:,}", ", ".join(each for each in more if each)

    speeds = [each.tokens_per_s for each in steps if each.tokens_per_s > 0 and math.isfinite(each.tokens_per_s)]
    mfus = [each.mfu for each in steps if each.mfu is not None]
    if speeds:
        mfu = f", mfu {show_mfu(statistics.median(mfus))}" if mfus else ""
        found["speed"] = f"{statistics.median(speeds):,.0f}", f"tokens/s{mfu}"

    measured, planned = measured_peak(record), planned_peak(record)
    if measured or planned:
        plan = f"planned {show_bytes(planned)}" if planned else ""
        found["peak memory"] = ((show_bytes(measured), f"reserved; {plan}" if plan else "reserved") if measured else
                                ("–", plan))

    seconds = elapsed(steps)[-1][1] if steps else 0.0
    saves = f"saved {len(record.saves):,} time{'' if len(record.saves) == 1 else 's'}"
    found["time in steps"] = show_seconds(seconds) if seconds else "–", saves
    return found


def steps_done(record: RunRecord) -> int:
    """The last step reported, evaluated or saved."""
    return max([0, *(each.step + 1 for each in record.steps[-1:]), *(each.step for each in record.evaluations[-1:]),
                *record.saves[-1:]])


def validation_losses(record: RunRecord) -> list[tuple[int, SplitLoss]]:
    """(step, loss) per evaluation with a finite validation loss."""
    return [(each.step, loss) for each in record.evaluations if (loss := loss_of(each, "val"))
            and math.isfinite(loss.mean)]


def loss_of(evaluation: Evaluation, split: str) -> SplitLoss | None:
    return next((loss for loss in evaluation.losses if loss.split == split), None)


def planned_peak(record: RunRecord) -> int:
    return max((each.reserved for each in record.planned.values()), default=0)


def measured_peak(record: RunRecord) -> int:
    return max((each.reserved for each in record.measured.values()), default=0)


def elapsed(steps: Sequence[StepReport]) -> list[tuple[int, float]]:
    """(step, seconds of training until then): of steps alone, without evaluations and saves."""
    seconds = 0.0
    found = [(each.step, 0.0) for each in steps[:1]]
    for before, after in pairwise(steps):  # each report has the mean seconds of the steps since the one before
        spent = (after.step - before.step) * after.seconds
        seconds += spent if 0 <= spent < 1e12 else 0.0
        found.append((after.step, seconds))
    return found


# ---- to type and to download


def reproduce(record: RunRecord) -> list[str]:
    """The words of a command that trains the same run again, in another folder; empty if its config is not known."""
    known = option_specs(RunConfig)
    given = {key: record.config[key] for key in record.unusual if key in known and key not in NOT_REPEATED}
    if given.get("init_from") == "resume":
        del given["init_from"]
    if not given:
        return []
    return ["fitgpt", "train", *(f"--{key}={shown(value)}" for key, value in given.items()),
            f"--out_dir=runs/{record.name.replace('/', '-')}-again"]


def to_csv(records: Sequence[RunRecord]) -> str:
    """A row per reported step and per evaluation."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "step", "tokens", "hours", "loss", "learning_rate", "grad_norm", "tokens_per_s",
                   "peak_reserved_bytes", "evaluated_train_loss", "evaluated_val_loss"])
    for record in records:
        size = record.facts.tokens_per_step if record.facts else 0
        stride = -(-len(record.steps) // MAX_CSV_STEPS) or 1
        for report, (_, seconds) in list(zip(record.steps, elapsed(record.steps), strict=True))[::stride]:
            rows.writerow([record.name, report.step, report.step * size or "", f"{seconds / 3600:.6g}",
                           *(f"{value:.6g}" for value in (report.loss, report.lr, report.grad_norm)),
                           f"{report.tokens_per_s:.0f}", report.memory.peak_reserved or "", "", ""])
        for each in record.evaluations:
            losses = [f"{loss.mean:.6g}" if (loss := loss_of(each, split)) else "" for split in ("train", "val")]
            rows.writerow([record.name, each.step, each.step * size or "", *[""] * 5,
                           each.memory.peak_reserved or "", *losses])
    return text.getvalue()
