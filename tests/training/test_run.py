"""A run does what a plain training loop does, and says so in metrics.jsonl."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from fitgpt.config.optimizers import checkpoint_bytes
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import CheckpointError, DataError, Interrupted, NumericsError, SystemFault, UsageError
from fitgpt.core.files import seal_json, unseal_json
from fitgpt.data.dataset import open_dataset
from fitgpt.data.sample_order import positions_for
from fitgpt.engine.device import DeviceChoice
from fitgpt.engine.model import GPT, build_model
from fitgpt.hardware import gpus
from fitgpt.planning import measured_speeds
from fitgpt.runs.folder import RunFolder, recorded_config
from fitgpt.runs.metrics import read_metrics
from fitgpt.show.progress import Display
from fitgpt.training import checkpoint
from fitgpt.training.build import build_training
from fitgpt.training.reporter import SPEED_REPORTS
from fitgpt.training.run import run
from fitgpt.training.trained_model import open_weights
from tests.helpers import reference_loss, skip_without_library, tiny_config


def train(config: RunConfig, stop_after: int | None = None) -> list[dict]:
    stop_checks = iter(range(10**9))
    run(config.to_dict(), [], lambda: stop_after is not None and next(stop_checks) >= stop_after)
    return read_metrics(Path(config.out_dir) / "metrics.jsonl")


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows if row["kind"] == "step"]


def plain_losses(config: RunConfig) -> list[float]:
    """The whole of training, written a second time with nothing but torch: full logits, AdamW, clip_grad_norm_."""
    model = build_model(config.gpt_config(), torch.device("cpu"), config.seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": config.weight_decay},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=config.learning_rate, betas=(config.beta1, config.beta2))
    data = open_dataset(config.dataset).split("train")
    curve = []
    for step in range(config.max_iters):
        total = 0.0
        for micro in range(config.gradient_accumulation_steps):
            samples = positions_for(step, micro, batch_size=config.batch_size,
                                    accumulation=config.gradient_accumulation_steps)
            tokens = torch.from_numpy(data.read(samples, config.block_size, config.seed))
            loss = reference_loss(model, tokens[:, :-1], tokens[:, 1:])
            (loss / config.gradient_accumulation_steps).backward()
            total += loss.item() / config.gradient_accumulation_steps
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        if step < config.warmup_iters:
            rate = config.learning_rate * (step + 1) / (config.warmup_iters + 1)
        else:
            ratio = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
            rate = config.min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (config.learning_rate - config.min_lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        curve.append(total)
    return curve


def test_twenty_steps_have_the_loss_curve_of_a_plain_loop(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    ours = losses(train(config))
    plain = plain_losses(config)
    assert len(ours) == 20
    assert ours == pytest.approx(plain, rel=1e-4)
    assert ours[-1] < ours[0] - 0.5


def test_a_closed_stdout_does_not_fail_the_run(tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    close = Display.close

    def leave(display: Display) -> None:
        close(display)
        os.close(reader)

    monkeypatch.setattr(Display, "close", leave)
    monkeypatch.setattr(sys, "stdout", open(writer, "w"))  # noqa: SIM115
    train(tiny_config(tmp_path, max_iters=2))
    sys.stdout.close()
    assert checkpoint.load(tmp_path / "out" / "checkpoints", "last").state["step"] == 2


def test_the_closing_is_printed_on_a_terminal_without_unicode(tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    train(tiny_config(tmp_path, max_iters=2))
    assert b"Generate text: fitgpt sample" in raw.getvalue()
    assert b" +/- 0." in raw.getvalue()
    assert b"?" not in raw.getvalue()


def test_the_display_advances_at_every_micro_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advances: list[float] = []
    monkeypatch.setattr(Display, "advance", lambda display, steps: advances.append(steps))
    train(tiny_config(tmp_path, max_iters=2, gradient_accumulation_steps=4, log_interval=10))
    assert advances == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_a_disk_that_is_full_for_a_while_loses_no_step_and_no_metrics_row(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real, calls = RunFolder.append_metrics, iter(range(1000))

    def full_for_a_while(self: RunFolder, row: dict) -> None:
        if 4 <= next(calls) < 9:
            raise SystemFault("Cannot append to metrics.jsonl: No space left on device.")
        real(self, row)

    monkeypatch.setattr(RunFolder, "append_metrics", full_for_a_while)
    rows = train(tiny_config(tmp_path, max_iters=12))
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(12))
    assert capsys.readouterr().out.count("metrics are written when there is space again") == 1


def test_the_split_of_a_step_into_micro_batches_changes_only_rounding(tmp_path: Path) -> None:
    one = losses(train(tiny_config(tmp_path / "a", batch_size=8, gradient_accumulation_steps=1)))
    eight = losses(train(tiny_config(tmp_path / "b", batch_size=1, gradient_accumulation_steps=8)))
    assert one == pytest.approx(eight, rel=1e-4)


def test_memory_savers_change_only_rounding(tmp_path: Path) -> None:
    plain = losses(train(tiny_config(tmp_path / "a")))
    small = losses(train(tiny_config(tmp_path / "b", grad_checkpoint=True, loss_chunk=5, eval_batch_size=1)))
    assert plain == pytest.approx(small, rel=1e-5)


def test_the_first_metrics_row_describes_the_run(tmp_path: Path) -> None:
    rows = train(tiny_config(tmp_path, max_iters=2))
    assert rows[0]["kind"] == "run"
    assert rows[0]["config"]["n_embd"] == 32
    assert rows[0]["config"]["dtype"] == "float32"  # as resolved, not "auto"
    assert rows[0]["versions"]["torch"] == torch.__version__
    kinds = [row["kind"] for row in rows]
    assert kinds == ["run", "eval", "step", "step", "eval", "save"]


def test_the_speed_of_a_finished_run_on_a_gpu_is_kept_for_later_estimates(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path / "home"))
    train(tiny_config(tmp_path / "cpu", max_iters=12))
    assert not (tmp_path / "home").exists()
    card = gpus.find("4070")
    on_gpu = DeviceChoice("cpu", "", "float32", compile=False, notes=(), card=card, mismatch=None)
    monkeypatch.setattr("fitgpt.training.run.resolve_device", lambda *requested: on_gpu)
    train(tiny_config(tmp_path / "short", max_iters=3))
    with pytest.raises(Interrupted):
        train(tiny_config(tmp_path / "stopped", max_iters=100), stop_after=80)
    assert measured_speeds.load(card.name) == []
    rows = train(tiny_config(tmp_path / "gpu", max_iters=12))
    kept, = measured_speeds.load(card.name)
    speeds = [row["tokens_per_s"] for row in rows if row["kind"] == "step"]
    assert kept.tokens_per_s == pytest.approx(median(speeds[-SPEED_REPORTS:]), rel=1e-3)
    assert (kept.source, kept.config.n_embd) == ("train", 32)
    assert kept.basis.endswith(f"(train, torch {torch.__version__})")


def test_evaluation_uses_its_own_batch_and_block(tmp_path: Path) -> None:
    def first_eval(**changes: int) -> dict:
        folder = tmp_path / "-".join(f"{k}{v}" for k, v in changes.items())
        rows = train(tiny_config(folder, max_iters=1, **changes))
        return next(row for row in rows if row["kind"] == "eval")

    whole, small = first_eval(eval_batch_size=0), first_eval(eval_batch_size=3)
    assert [s["mean"] for s in small["losses"]] == pytest.approx([s["mean"] for s in whole["losses"]], rel=1e-6)
    assert whole["losses"][1]["windows"] == 2 * 4
    assert first_eval(eval_block_size=8)["losses"][1]["block"] == 8


def test_eval_only_evaluates_once_and_trains_nothing(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, eval_only=True)
    assert [row["kind"] for row in train(config)] == ["run", "eval"]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_finished_run_can_be_evaluated_once_more_and_is_left_as_it_was(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train(config)
    before = weights(config)
    rows = train(replace(config, init_from="resume", eval_only=True))
    assert [row["kind"] for row in rows][-2:] == ["run", "eval"]
    with pytest.raises(Interrupted, match=r"as requested\.$"):
        train(replace(config, init_from="resume", eval_only=True, save_interval=1), stop_after=1)
    assert weights(config) == before
    recorded = recorded_config(config.out_dir)
    assert recorded is not None
    assert not recorded["eval_only"]  # so that a resume trains


def test_a_run_that_only_evaluates_has_neither_optimizer_nor_gradients(tmp_path: Path) -> None:
    training = build_training(tiny_config(tmp_path, eval_only=True),
                              DeviceChoice("cpu", "", "float32", compile=False, notes=(), card=None, mismatch=None))
    assert training.optimizer.tensors() == {}
    assert not any(parameter.grad is not None for parameter in training.model.parameters())


def test_without_always_save_only_improvements_are_kept(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, always_save_checkpoint=False, max_iters=30, eval_interval=1, learning_rate=0.5,
                         min_lr=0.5, grad_clip=0.0, warmup_iters=0)
    rows = train(config)
    evals = {row["step"]: row["best"] for row in rows if row["kind"] == "eval" and row["step"] > 0}
    assert {row["step"] for row in rows if row["kind"] == "save"} == {step for step, best in evals.items() if best}
    assert not all(evals.values())  # a learning rate this wild does not improve every time


def test_a_stop_drops_the_unfinished_step_and_the_rest_is_bit_identical(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path / "whole", dropout=0.2)
    train(whole)
    config = tiny_config(tmp_path / "halves", dropout=0.2)
    with pytest.raises(Interrupted, match="Stopped at step 7"):
        # In the middle of step 7: verifying the two files asks once each, the evaluation at 0 four times.
        train(config, stop_after=2 + 4 + 7 * 2)
    train(replace(config, init_from="resume", rehearse=True))  # which leaves no trace
    assert weights(config) == weights(whole)


def weights(config: RunConfig) -> bytes:
    return (Path(config.out_dir) / "checkpoints" / "step-00000020" / "model.safetensors").read_bytes()


def test_a_resume_may_split_steps_into_other_micro_batches(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_iters=10)
    train(config)
    rows = train(replace(config, init_from="resume", max_iters=20, batch_size=2, gradient_accumulation_steps=4))
    whole = losses(train(tiny_config(tmp_path / "whole", max_iters=20)))
    assert losses(rows) == pytest.approx(whole, rel=1e-3)


def test_the_checkpoints_of_another_run_are_not_resumed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_iters=2)
    train(config)
    other = replace(config, n_embd=16, out_dir=str(tmp_path / "other"))
    train(other)
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "out" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"not a checkpoint of the run in .*run\.json.* n_embd=32 \(it was 16\)"):
        train(replace(config, init_from="resume", max_iters=4))


def test_a_shape_that_the_weights_do_not_have_is_an_error_before_a_model_is_made(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_iters=1, eval_interval=1)
    train(config)
    file = next((tmp_path / "out" / "checkpoints").glob("*/state.json"))
    document = unseal_json(file.read_text())
    document["state"]["gpt"]["n_layer"] = 2**30
    file.write_text(seal_json(document))
    with pytest.raises(CheckpointError, match="says n_layer=1073741824 and holds"):
        open_weights(config.out_dir, "last")


def test_a_folder_that_holds_a_run_is_not_started_over(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_iters=2)
    train(config)
    with pytest.raises(UsageError, match="already holds a run"):
        train(replace(config, n_layer=3))


def test_other_data_on_resume_is_rejected(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_iters=2)
    train(config)
    from tests.helpers import write_dataset

    other = write_dataset(tmp_path / "other", tokens=7000)
    with pytest.raises(DataError, match="not the data this run was trained on"):
        train(replace(config, init_from="resume", max_iters=4, dataset=other))


def test_a_token_beyond_the_vocabulary_is_rejected_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary"):
        train(tiny_config(tmp_path, vocab_size=40))


def test_a_checkpoint_without_its_optimizer_is_never_resumed_afresh(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_iters=2)
    train(config)
    for folder in (tmp_path / "out" / "checkpoints").iterdir():
        (folder / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        train(replace(config, init_from="resume", max_iters=4))


def test_steps_that_are_never_finite_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finite = GPT.accumulate
    monkeypatch.setattr(GPT, "accumulate", lambda self, *batch_and_scale: finite(
        self, *batch_and_scale[:2], batch_and_scale[2] * math.nan))
    config = tiny_config(tmp_path, max_skipped_steps=5)
    with pytest.raises(NumericsError, match="5 steps in a row"):
        train(config)
    rows = read_metrics(Path(config.out_dir) / "metrics.jsonl")
    assert [row["skipped"] for row in rows if row["kind"] == "step"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_and_resumes_exactly(tmp_path: Path, dtype: str) -> None:
    whole, config = (tiny_config(tmp_path / name, dtype=dtype) for name in ("whole", "halves"))
    curve = losses(train(whole))
    assert curve[-1] < curve[0] - 0.5
    train(replace(config, max_iters=10))
    train(replace(config, init_from="resume", rehearse=True))  # which leaves no trace
    assert weights(config) == weights(whole)


SAVERS = {  # name → what it changes, and how far its last loss may lie from the exact one's
    "no_mlp_up": (dict(saved_activations="no_mlp_up"), 1e-3),
    "kept casts": (dict(casts="kept", dtype="bfloat16"), 0.05),
    "kept gradients, late states": (dict(gradients="kept", states="late"), 0.0),
    "mixed policies": (dict(saved_activations="1*input,1*all"), 1e-3),
    "offload": (dict(offload="optimizer"), 1e-3),
    "offloaded gradients": (dict(offload="gradients"), 1e-3),
    "offloaded masters": (dict(weights="bfloat16", dtype="bfloat16", offload="optimizer"), 0.05),
    "offloaded masters and gradients": (dict(weights="bfloat16", dtype="bfloat16", offload="gradients"), 0.05),
    "bfloat16 residual": (dict(residual="bfloat16", dtype="bfloat16"), 0.05),
    "bfloat16 weights": (dict(weights="bfloat16", dtype="bfloat16"), 0.05),
    "adam8bit": (dict(optimizer="adam8bit"), 0.05),
    "adam8bit by bitsandbytes": (dict(optimizer="adam8bit", adam8bit="bitsandbytes"), 0.05),
    "all lossy": (dict(optimizer="adam8bit", weights="bfloat16", residual="bfloat16", dtype="bfloat16"), 0.1),
    "muon": (dict(optimizer="muon"), 1.0),  # another optimizer: it must train, not agree
    "step in backward": (dict(step_in_backward=True, gradient_accumulation_steps=1, batch_size=8, grad_clip=0.0), 0.3),
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(train(tiny_config(tmp_path_factory.mktemp("exact"))))


@pytest.mark.parametrize("name", SAVERS)
def test_every_saver_trains_and_resumes_exactly(tmp_path: Path, name: str, exact: list[float]) -> None:
    changes, distance = SAVERS[name]
    skip_without_library(changes)
    whole = tiny_config(tmp_path / "whole", **changes)
    curve = losses(train(whole))
    assert curve[-1] < curve[0] - 0.5
    assert abs(curve[-1] - exact[-1]) <= distance
    halves = tiny_config(tmp_path / "halves", **changes)
    train(replace(halves, max_iters=10))
    train(replace(halves, init_from="resume", rehearse=True))  # which leaves no trace either
    assert weights(halves) == weights(whole)
    written = sum((Path(halves.out_dir) / "checkpoints" / "step-00000020" / f"{part}.safetensors").stat().st_size
                  for part in ("model", "optimizer"))
    assert 0 <= written - checkpoint_bytes(halves) < 20_000  # headers


@pytest.mark.parametrize("name", ["offloaded gradients", "step in backward"])
def test_a_stop_neither_repeats_nor_loses_a_step_with_offloaded_gradients(tmp_path: Path, name: str) -> None:
    whole, config = (tiny_config(tmp_path / part, **SAVERS[name][0]) for part in ("whole", "halves"))
    train(whole)
    with pytest.raises(Interrupted):
        train(config, stop_after=15)
    train(replace(config, init_from="resume"))
    assert weights(config) == weights(whole)
