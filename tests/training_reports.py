"""A run's facts, one step report and one evaluation, for the tests of what training prints."""

from __future__ import annotations

from fitgpt.core.units import GiB
from fitgpt.runs.metrics import Evaluation, MemoryReading, RunFacts, SplitLoss, StepReport

FACTS = RunFacts(
    config=dict(n_layer=12, n_head=12, n_embd=576, block_size=1024, batch_size=16, gradient_accumulation_steps=32),
    params=77_360_000, device="cuda:0", device_name="NVIDIA GeForce RTX 4070", dtype="bfloat16", compiled=True,
    peak_flops=58.3e12, peak_source="RTX 4070, 58.3 TFLOP/s dense half precision (formula)", tokens_per_step=524288,
    train_tokens=9_040_000_000, val_tokens=4_400_000, start_step=0, max_iters=5000, versions={},
    notes=("compile: on, because [triton] can run here.",))
REPORT = StepReport(
    step=100, loss=2.34561, lr=1e-3, grad_norm=1.0, seconds=0.12345, tokens_per_s=98304.4, mfu=0.1234, skipped=0,
    loss_scale=1.0, memory=MemoryReading(3 * GiB, int(3.21 * GiB), 4 * GiB, int(4.56 * GiB)), seconds_left=200.0)
EVALUATION = Evaluation(500, (SplitLoss("train", 1.23454, 0.0021, 1600, 1024),
                              SplitLoss("val", 1.34561, 0.0034, 1600, 1024)), 412345.0, MemoryReading())
