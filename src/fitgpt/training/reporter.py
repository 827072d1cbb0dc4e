"""What the training loop asks of the world: evaluates, saves and tells, on the display and in metrics.jsonl."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..config.run_config import RunConfig
from ..core.errors import SystemFault
from ..core.files import disk_faults
from ..engine.device import read_memory
from ..engine.evaluate import ReadWindows, Shrunk, evaluate
from ..engine.oom import NoRoom, Refusal
from ..engine.signs import fragmentation, may_spill, spill
from ..nouns import DataSummary, Evaluation, MemoryReading, RunFacts, StepReport
from ..runs.folder import RunFolder
from ..show.live import Display
from . import checkpoint
from .divergence import checkpoint_status
from .dry_run import Peaks
from .loop import Training
from .wandb_tracker import Log

ROWS_THAT_WAIT = 100_000  # some 50 MB of the host's memory; then the oldest are lost
GLANCE = 2  # batches of each split: where work is recorded, the first runs as it is and the second is recorded

Splits = Mapping[str, tuple[ReadWindows, int]]


class Desk:
    """`card_bytes`: what the card has in all; 0 where it does not say."""

    def __init__(self, config: RunConfig, facts: RunFacts, splits: Splits, data: DataSummary, folder: RunFolder,
                 training: Training, display: Display, wandb: Log | None, stop_asked: Callable[[], bool], *,
                 peaks: Peaks, card_bytes: int = 0) -> None:
        self._config, self._facts, self._splits, self._data = config, facts, splits, data
        self._folder, self._training, self._display, self._stop_asked = folder, training, display, stop_asked
        self._wandb = wandb
        self.peaks = peaks
        self.eval_batch = config.eval_batch  # becomes smaller where memory runs out
        self._last_report: StepReport | None = None
        self._waiting: deque[dict[str, Any]] = deque(maxlen=ROWS_THAT_WAIT)  # for the record
        self._signs = Signs(card_bytes)

    def evaluate(self, step: int) -> Evaluation | Refusal | None:
        try:
            return evaluate(self._training.model, self._splits, batch=self.eval_batch, block=self._config.eval_block,
                            step=step, token_losses=self._training.token_losses,
                            progress=self._display.eval_progress, stop_asked=self._stop_asked, shrunk=self._shrunk)
        except NoRoom as error:
            self.warn(f"{error.what} The evaluation of step {step} is left out; training goes on.")
            return Refusal(error.what)

    def glance(self) -> Evaluation | None:
        try:
            return glance(self._training, self._splits, self.eval_batch, self._config.eval_block, self._shrunk)
        except NoRoom as error:
            self.warn(f"{error.what} It goes on without this look at the data.")
            return None

    def _shrunk(self, batch: int, why: Refusal) -> None:
        self.eval_batch = batch
        self.tell({"kind": "oom", "step": self._training.step, "phase": "eval", "words": why.words,
                   "text": f"Memory ran out in the evaluation of step {self._training.step}: {why.short}. It goes on "
                   f"with {batch} window{'s' if batch > 1 else ''} at once, which changes no loss."})

    def save(self, training: Training, *, is_best: bool) -> None:
        started = time.perf_counter()
        state = {"step": training.step, "evaluated_at": training.evaluated_at,
                 "evaluation_status": training.evaluation_status,
                 "last_good": asdict(training.last_good) if training.last_good else None,
                 "best": asdict(training.best) if training.best else None, "scaler": training.scaler.to_dict(),
                 "config": self._config.to_dict(), "gpt": asdict(training.model.config),
                 "data": self._data.fingerprint, "tokenizer": self._data.tokenizer,
                 "characters": self._data.characters}  # so that the run writes without its data, wherever it is moved
        weights, moments = training.model.weight_tensors(), training.optimizer.tensors()
        before = read_memory(self._facts.device)
        saved = checkpoint.save(self._folder.checkpoints, training.step, weights, moments, state, best=is_best,
                                keep_last=self._config.keep_last, status=checkpoint_status(training))
        after = read_memory(self._facts.device)  # a save allocates nothing on the card: what it holds is there
        self.peaks.seen("save", MemoryReading(peak_allocated=max(before.allocated, after.allocated),
                                              peak_reserved=max(before.reserved, after.reserved)))
        for note in saved.notes:
            self._display.note(note)
        seconds = time.perf_counter() - started
        nbytes = sum(each.numel() * each.element_size() for part in (weights, moments) for each in part.values())
        self._record({"kind": "save", "step": training.step, "best": is_best, "seconds": seconds})
        self._display.saved(str(saved.path), seconds, nbytes)

    def set_aside_diverged(self) -> checkpoint.SetAside:
        with disk_faults("set checkpoints aside in", self._folder.checkpoints):
            return checkpoint.set_aside_diverged(self._folder.checkpoints)

    def advanced(self, steps: float) -> None:
        self._display.advance(steps)

    def reported(self, report: StepReport) -> None:
        self._last_report = report
        self.peaks.seen("train" if "first_train" in self.peaks.of else "first_train", report.memory)
        self._record({"kind": "step", **asdict(report)})
        self._display.step(report)
        for note in self._signs.of(report, self.peaks.most_allocated):
            self.tell({"kind": "note", "step": report.step, "text": note})

    def evaluated(self, evaluation: Evaluation, *, is_best: bool) -> None:
        self.peaks.seen("eval" if "first_eval" in self.peaks.of else "first_eval", evaluation.memory)
        self._record({"kind": "eval", "best": is_best, **asdict(evaluation)})
        self._display.evaluated(evaluation, is_best)
        if self._wandb:
            last = self._last_report
            self._wandb({"iter": evaluation.step, "train/loss": evaluation.of("train").mean,
                         "val/loss": evaluation.of("val").mean, "lr": last.lr if last else 0.0,
                         "mfu": 100 * (last.mfu or 0.0) if last else 0.0})

    def _record(self, row: dict[str, Any]) -> None:
        """A full disk stops no training: rows wait here, in their order, until there is room for them."""
        self._waiting.append(row)
        try:
            while self._waiting:
                self._folder.append_metrics(self._waiting[0])
                self._waiting.popleft()
        except SystemFault as fault:
            if len(self._waiting) == 1:
                self._display.warn(f"{fault.what} Training goes on; what is to be recorded waits until there is room.")

    def warn(self, sentence: str) -> None:
        self._record({"kind": "warning", "text": sentence})
        self._display.warn(sentence)

    def tell(self, row: dict[str, Any]) -> None:
        self._record(row)
        if row.get("text"):
            show = self._display.warn if row["kind"] in ("oom", "went_back", "step_down") else self._display.note
            show(row["text"])


def glance(training: Training, splits: Splits, batch: int, block: int, shrunk: Shrunk) -> Evaluation | None:
    """An evaluation over so few windows that it only shows what one holds."""
    few = {split: (read, min(windows, GLANCE * batch)) for split, (read, windows) in splits.items()}
    return evaluate(training.model, few, batch=batch, block=block, step=training.step,
                    token_losses=training.token_losses, shrunk=shrunk)


class Signs:
    """What the figures of steps say of the card's memory, each thing once."""

    def __init__(self, card_bytes: int) -> None:
        self._card_bytes, self._may_spill = card_bytes, may_spill()
        self._said: set[str] = set()
        self._usual_seconds = 0.0  # the shortest step so far

    def of(self, report: StepReport, most_allocated: int) -> list[str]:
        notes = {"fragmentation": fragmentation(report.memory.peak_reserved, most_allocated)}
        if self._may_spill and self._card_bytes:
            notes["spill"] = spill(report.memory, self._card_bytes, report.seconds, self._usual_seconds)
        self._usual_seconds = min(self._usual_seconds or report.seconds, report.seconds)
        new = [sign for sign, note in notes.items() if note and sign not in self._said]
        self._said.update(new)
        return [notes[sign] for sign in new]
