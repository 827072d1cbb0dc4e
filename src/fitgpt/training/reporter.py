"""The training loop's callbacks: evaluates, saves, and reports on the display and in metrics.jsonl."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from ..config.run_config import RunConfig
from ..core.errors import SystemFault
from ..core.files import disk_faults
from ..data.shards import DataSummary
from ..engine.batches import ReadWindows
from ..engine.device import read_memory
from ..engine.evaluate import Shrunk, evaluate
from ..engine.oom import EvaluationDoesNotFit, OutOfMemory, fragmentation, may_spill, spill
from ..runs.folder import RunFolder
from ..runs.metrics import Evaluation, RunFacts, StepReport
from ..show.progress import Display
from . import checkpoint
from .device_memory import Peaks
from .divergence import checkpoint_status
from .liveness import SAVING, Heartbeat
from .loop import Training
from .trackers import Tracker

MAX_WAITING_ROWS = 100_000  # about 50 MB of CPU RAM; then the oldest are dropped
SPEED_REPORTS = 10  # reports of a run from which its speed is kept for later estimates
SHORT_EVAL_BATCHES = 2  # per split: with CUDA graphs the first runs eagerly and the second is captured

Splits = Mapping[str, tuple[ReadWindows, int]]


class TrainingReporter:
    """What the loop calls. `card_bytes`: the GPU's usable memory; 0: not known."""

    def __init__(self, config: RunConfig, facts: RunFacts, splits: Splits, data: DataSummary, folder: RunFolder,
                 training: Training, display: Display, trackers: Sequence[Tracker], stop_requested: Callable[[], bool],
                 peaks: Peaks, card_bytes: int, heartbeat: Heartbeat | None = None) -> None:
        self._config, self._facts, self._splits, self._data = config, facts, splits, data
        self._folder, self._training, self._display, self._stop_requested = folder, training, display, stop_requested
        self._trackers = trackers
        self.peaks = peaks
        self.heartbeat = heartbeat or Heartbeat(log_interval=config.log_interval)
        self.eval_batch = config.eval_batch  # halved when memory runs out
        self._last_report: StepReport | None = None
        self._speeds: deque[float] = deque(maxlen=SPEED_REPORTS)  # tokens per second of the last reports
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING_ROWS)  # to be written
        self._memory_warnings = MemoryWarnings(card_bytes)

    def advanced(self, steps: float) -> None:
        """Called after every micro-step."""
        self.heartbeat.advanced(steps)
        self._display.advance(steps)

    def evaluate(self) -> Evaluation | OutOfMemory | None:
        training = self._training
        self.heartbeat.begin("an evaluation")

        def progress(done: int, total: int, split: str) -> None:
            self.heartbeat.beat()
            self._display.eval_progress(done, total, split)

        try:
            return evaluate(training.model, self._splits, batch=self.eval_batch, block=self._config.eval_block,
                            step=training.step, token_losses=training.token_losses, shrunk=self._shrunk,
                            progress=progress, stop_requested=self._stop_requested, ranks=training.ranks)
        except EvaluationDoesNotFit as error:
            self.warn(f"{error.what} The evaluation of step {training.step} is skipped; training continues.")
            return OutOfMemory(error.what)

    def short_eval(self) -> Evaluation | None:
        """A short evaluation with the run's settings; None if not even one window fits."""
        self.heartbeat.begin("a short evaluation")
        try:
            return short_eval(self._training, self._splits, self.eval_batch, self._config.eval_block, self._shrunk)
        except EvaluationDoesNotFit as error:
            self.warn(f"{error.what} The short evaluation is skipped.")
            return None

    def _shrunk(self, batch: int, why: OutOfMemory) -> None:
        self.eval_batch = batch
        self.tell({"kind": "oom", "step": self._training.step, "phase": "eval", "words": why.message,
                   "text": f"Out of memory in the evaluation of step {self._training.step}: {why.short}. It continues "
                   f"with {batch} window{'s' if batch > 1 else ''} at once, which changes no loss."})

    def save(self, *, is_best: bool) -> None:
        started, training = time.perf_counter(), self._training
        self.heartbeat.begin(SAVING)  # on every rank: the others wait for rank 0
        if not training.ranks.is_first:
            return
        state = {"step": training.step, "evaluated_at": training.evaluated_at,
                 "evaluation_status": training.evaluation_status,
                 "last_good": asdict(training.last_good) if training.last_good else None,
                 "best": asdict(training.best) if training.best else None, "scaler": training.scaler.to_dict(),
                 "config": self._config.to_dict(), "gpt": asdict(training.model.config),
                 "data": self._data.fingerprint, "tokenizer": self._data.tokenizer,
                 "characters": self._data.characters}  # so that `sample` works without the dataset
        weights, moments = training.model.weight_tensors(), training.optimizer.tensors()
        before = read_memory(self._facts.device)
        self._folder.check_ours()
        saved = checkpoint.save(self._folder.checkpoints, training.step, weights, moments, state, best=is_best,
                                keep_last=self._config.keep_last, status=checkpoint_status(training))
        after = read_memory(self._facts.device)  # a save allocates no GPU memory
        memory = replace(after, peak_allocated=max(before.allocated, after.allocated),
                         peak_reserved=max(before.reserved, after.reserved))
        for note in saved.notes:
            self._display.note(note)
        seconds = time.perf_counter() - started
        nbytes = sum(each.numel() * each.element_size() for part in (weights, moments) for each in part.values())
        self._record({"kind": "save", "step": training.step, "best": is_best, "seconds": seconds,
                      "memory": asdict(memory)})
        self._display.saved(str(saved.path), seconds, nbytes)

    def set_aside_diverged(self) -> checkpoint.SetAside:
        if not self._training.ranks.is_first:
            return checkpoint.SetAside(None, [], self._folder.checkpoints)
        self._folder.check_ours()
        with disk_faults("set checkpoints aside in", self._folder.checkpoints):
            return checkpoint.set_aside_diverged(self._folder.checkpoints)

    def reported(self, report: StepReport) -> None:
        self._last_report = report
        self.heartbeat.reported(report.seconds)
        self._speeds.append(report.tokens_per_s)
        self._record({"kind": "step", **asdict(report)})
        self._display.step(report)
        for note in self._memory_warnings.of(report, self.peaks.most_allocated):
            self.tell({"kind": "note", "step": report.step, "text": note})

    def tokens_per_s(self) -> float | None:
        """The speed of this run: the median of the last reports; None if there were too few. The first ones compile and
        capture CUDA graphs."""
        return median(self._speeds) if len(self._speeds) == SPEED_REPORTS else None

    def evaluated(self, evaluation: Evaluation, *, is_best: bool) -> None:
        self._record({"kind": "eval", "best": is_best, **asdict(evaluation)})
        self._display.evaluated(evaluation, is_best)
        last = self._last_report
        for tracker in self._trackers:
            tracker.log({"iter": evaluation.step, "train/loss": evaluation.of("train").mean,
                         "val/loss": evaluation.of("val").mean, "lr": last.lr if last else 0.0,
                         "mfu": 100 * (last.mfu or 0.0) if last else 0.0})
            if problem := tracker.problem():
                self.tell({"kind": "note", "step": evaluation.step, "text": problem})

    def _record(self, row: dict[str, Any]) -> None:
        """Writes a row of metrics.jsonl. On a full disk rows wait here, in order, and training continues."""
        self.peaks.add(row)
        self._waiting.append(row)
        try:
            while self._waiting:
                note = self._folder.append_metrics(self._waiting[0])
                self._waiting.popleft()
                if note:
                    self._display.warn(note)
        except SystemFault as fault:
            if len(self._waiting) == 1:
                self._display.warn(f"{fault.what} Training continues; metrics are written when there is space again.")

    def warn(self, sentence: str) -> None:
        self._record({"kind": "warning", "text": sentence})
        self._display.warn(sentence)

    def tell(self, row: dict[str, Any]) -> None:
        """An event: a row for metrics.jsonl, whose `text` is shown to the user."""
        if row["kind"] in ("oom", "step_down", "step_up"):
            self.heartbeat.forget()
        self._record(row)
        if row.get("text"):
            show = self._display.warn if row["kind"] in ("oom", "went_back", "step_down") else self._display.note
            show(row["text"])


def short_eval(training: Training, splits: Splits, batch: int, block: int, shrunk: Shrunk) -> Evaluation | None:
    """An evaluation over just enough windows to show how much memory one takes."""
    most = SHORT_EVAL_BATCHES * batch * training.ranks.world
    few = {split: (read, min(windows, most)) for split, (read, windows) in splits.items()}
    return evaluate(training.model, few, batch=batch, block=block, step=training.step,
                    token_losses=training.token_losses, shrunk=shrunk, ranks=training.ranks)


class MemoryWarnings:
    """Warnings about GPU memory that follow from step reports, each given once."""

    def __init__(self, card_bytes: int) -> None:
        self._card_bytes, self._may_spill = card_bytes, may_spill()
        self._given: set[str] = set()
        self._shortest_step = 0.0  # seconds

    def of(self, report: StepReport, most_allocated: int) -> list[str]:
        notes = {"fragmentation": fragmentation(report.memory.peak_reserved, most_allocated)}
        if self._may_spill and self._card_bytes:
            notes["spill"] = spill(report.memory, self._card_bytes, report.seconds, self._shortest_step)
        self._shortest_step = min(self._shortest_step or report.seconds, report.seconds)
        new = [name for name, note in notes.items() if note and name not in self._given]
        self._given.update(new)
        return [notes[name] for name in new]
