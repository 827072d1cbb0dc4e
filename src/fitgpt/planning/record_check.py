"""The runs of `fitgpt record`, and whether the planner explains what they used: record → figures that differ.

A record is explained if there is one cuBLAS workspace and one attention kernel with which the replay of every run gives
the reserved bytes exactly and the allocated bytes within SMALL_SCALARS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..config.run_config import RunConfig, resolve_run
from ..core.units import KiB, show_bytes
from ..memory.platform import LARGE_WORKSPACE, SMALL_WORKSPACE, Platform
from ..memory.timeline import PhasePeak, replay, reserved_in_other_orders
from ..tapes import aten
from ..tapes import engine as engine_tape
from .forecast import replay_run
from .gpu_record import SUM_COLUMNS, SUM_ROWS, GpuRecord, GpuRun
from .speed import matmul_peak

PHASES = ("load", "first_eval", "first_train", "train", "eval", "save")  # train includes its step
BLOCK = 512               # bytes: the allocator's smallest block
SMALL_SCALARS = 16 * KiB  # scalars of compiled code that are not on the tape, 512 bytes each (docs/accuracy.md)

# ---- the runs

SHAPE = {"n_layer": 4, "n_head": 8, "n_embd": 512, "batch_size": 8, "block_size": 512, "vocab_size": 50304,
         "gradient_accumulation_steps": 2}
SMALL = {"n_layer": 3, "n_head": 6, "n_embd": 384, "batch_size": 12, "block_size": 256, "vocab_size": 4096,
         "gradient_accumulation_steps": 2}
KERNELS = ("flash", "efficient", "cudnn", "math")
# Timed: three shapes, so that the estimates of other shapes are calibrated (speed.ENOUGH_SHAPES).
TIMED: dict[str, dict[str, Any]] = {
    "timed 124M": {"n_layer": 12, "n_head": 12, "n_embd": 768, "batch_size": 8, "block_size": 1024,
                   "vocab_size": 50304, "gradient_accumulation_steps": 4},
    "timed 30M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "batch_size": 16, "block_size": 512,
                  "vocab_size": 50304, "gradient_accumulation_steps": 4},
    "timed 11M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "batch_size": 64, "block_size": 256, "vocab_size": 256,
                  "gradient_accumulation_steps": 1}}


def cases(platform: Platform) -> list[GpuRun]:
    """The runs for a GPU, those that need torch.compile or flash attention only where it has them."""
    half = "bfloat16" if platform.has_bf16 else "float16"
    eager, compiled = {"compile": False, "dtype": half}, {"compile": True, "dtype": half}
    found = [GpuRun("eager", SHAPE | eager),
             GpuRun("eager, native allocator", SHAPE | eager, native=True),
             GpuRun("small, biases, dropout", SMALL | eager | {"bias": True, "dropout": 0.1}),
             GpuRun("float32", SMALL | eager | {"dtype": "float32"})]
    if platform.compiles:
        found += [GpuRun("compiled", SHAPE | compiled),
                  GpuRun("compiled, native allocator", SHAPE | compiled, native=True),
                  GpuRun("compiled, biases", SMALL | compiled | {"bias": True}),
                  GpuRun("compiled, float16", SMALL | compiled | {"dtype": "float16"}),
                  GpuRun("compiled, recomputed", SHAPE | compiled | {"saved_activations": "input"})]
    kernels = KERNELS if platform.has_bf16 else ("efficient", "math")
    found += [GpuRun(f"{kernel} attention", SHAPE | eager, kernel=kernel) for kernel in kernels]
    return found + [GpuRun(name, shape | (compiled if platform.compiles else eager))
                    for name, shape in TIMED.items()]


def needed(run: GpuRun, platform: Platform) -> int:
    """Bytes that the allocator has to be able to reserve for a run."""
    on = replace(platform, expandable=platform.expandable and not run.native, kernel=run.kernel)
    return replay_run(resolve_run(RunConfig(**run.config), on), on).needs


# ---- a run replayed


class Figure(NamedTuple):
    """One measured number of one recorded run, and what the tape says of it."""

    run: str
    name: str        # as the record has it: train_peak, eval_first_reserved …
    predicted: int
    measured: int

    @property
    def off(self) -> int:
        return self.predicted - self.measured

    @property
    def percent(self) -> float:
        return 100 * self.off / self.measured

    @property
    def explained(self) -> bool:
        return abs(self.off) <= (0 if self.name.endswith("reserved") else SMALL_SCALARS)

    def describe(self) -> str:
        return (f"{self.run}, {self.name}: recorded {self.measured:,} bytes, replayed {self.predicted:,} "
                f"({'+' if self.off > 0 else '−'}{show_bytes(abs(self.off))})")


def compare_run(name: str, config: Mapping[str, Any], phases: Mapping[str, Mapping[str, int]],
                platform: Platform) -> Iterable[Figure]:
    """Allocated and reserved of every phase of a run of our engine; reserved is the most since the run began."""
    run = resolve_run(RunConfig(**config), platform)
    tape = engine_tape.write(run, platform)
    peaks = replay(tape, expandable=platform.expandable).peaks()
    step, train = peaks["step"], peaks["train"]
    peaks["train"] = PhasePeak("train", max(train.allocated, step.allocated), step.reserved, 0)
    if "sample" in phases:
        peaks |= replay(engine_tape.write_sampling(run, platform), expandable=platform.expandable).peaks()
    # Without expandable segments the most that is reserved depends on the addresses that the driver returns.
    other_orders = () if platform.expandable else reserved_in_other_orders(tape)
    most = max(peaks[phase].reserved for phase in PHASES)
    reserved = 0
    for phase in (*PHASES, "sample"):
        if phase in phases:
            seen = phases[phase]
            reserved = seen["reserved"] if phase == "sample" else max(reserved, seen["reserved"])
            predicted = peaks[phase].reserved
            if predicted == most and reserved in other_orders:
                predicted = reserved
            yield Figure(name, f"{phase} allocated", peaks[phase].allocated, seen["allocated"])
            yield Figure(name, f"{phase} reserved", predicted, reserved)


# ---- a record explained


class Explanation(NamedTuple):
    """How a record is explained. `mismatches`: one sentence each; none: it is."""

    platform: Platform
    figures: tuple[Figure, ...]
    mismatches: tuple[str, ...]

    @property
    def exact(self) -> int:
        return sum(not figure.off for figure in self.figures)


def platform_of(record: GpuRecord) -> Platform:
    """What the rules say of the recorded GPU, whatever was recorded on it before."""
    major, minor = map(int, record.gpu.cc.split("."))
    return Platform((major, minor), record.torch, compiles=(major, minor) >= (7, 0), sms=record.gpu.sms,
                    recorded_cache=record.gpu.l2_bytes)


def explain(record: GpuRecord) -> Explanation:
    """The replay of every run with the workspace and attention kernel that explain most, the rules' own first."""
    by_rule = platform_of(record)
    # Before Hopper no version of torch has the large workspace, or prefers cuDNN's attention.
    hopper = by_rule.capability >= (9, 0)
    workspaces = (LARGE_WORKSPACE, SMALL_WORKSPACE) if hopper else (SMALL_WORKSPACE,)
    kernels = KERNELS if hopper else tuple(kernel for kernel in KERNELS if kernel != "cudnn")
    settings = [by_rule] + [replace(by_rule, recorded_workspace=workspace, recorded_attention=kernel)
                            for workspace in workspaces for kernel in kernels]
    best: Explanation | None = None
    for platform in settings:
        figures = tuple(figure for run in record.runs if run.phases for figure in _figures(run, platform))
        found = Explanation(platform, figures, (*_other_settings(record, platform),
                                                *(each.describe() for each in figures if not each.explained)))
        if best is None or len(found.mismatches) < len(best.mismatches):
            best = found
        if not best.mismatches:
            break
    assert best is not None
    wrong = [*_wrong_for_model(record, by_rule), *_impossible(record)]
    if not best.figures:
        wrong.append("The record has no run with figures of memory.")
    return best._replace(mismatches=(*wrong, *best.mismatches))


def differences(run: GpuRun, record: GpuRecord) -> list[str]:
    """What the replay of one run does not explain, with the workspace and the attention kernel that were recorded."""
    platform = replace(platform_of(record), recorded_workspace=record.gpu.workspace_bytes,
                       recorded_attention=record.attention)
    return [each.describe() for each in _figures(run, platform) if not each.explained]


def _figures(run: GpuRun, platform: Platform) -> Iterable[Figure]:
    on = replace(platform, expandable=not run.native, kernel=run.kernel)
    return compare_run(run.name, run.config, run.phases, on)


def _other_settings(record: GpuRecord, platform: Platform) -> list[str]:
    """What the record itself states of the workspace and the attention kernels, if it is not as in `platform`."""
    gpu, found = record.gpu, list[str]()
    if gpu.workspace_bytes and gpu.workspace_bytes != platform.workspace:
        found.append(f"cuBLAS workspace: recorded {gpu.workspace_bytes:,} bytes, replayed {platform.workspace:,}")
    for run in (run for run in record.runs if run.attention):
        resolved = resolve_run(RunConfig(**run.config), platform)
        expected = engine_tape.attention_kernel(resolved, replace(platform, kernel=run.kernel))
        if run.attention != expected:
            found.append(f"{run.name}: the attention kernel was {run.attention}, replayed with {expected}")
    return found


def bytes_of_sum(platform: Platform) -> int:
    """The peak of the sum that `fitgpt record` measures: its result and its scratch."""
    return sum(aten.round_up(nbytes, BLOCK) for nbytes in (
        4 * SUM_COLUMNS, *aten.sum_over_rows(SUM_ROWS, SUM_COLUMNS, platform)))


def _wrong_for_model(record: GpuRecord, platform: Platform) -> list[str]:
    """Figures of the GPU that contradict each other, its compute capability, or the table of GPUs."""
    gpu, model, found = record.gpu, record.model, list[str]()
    if gpu.threads != platform.threads:
        found.append(f"{gpu.threads} resident threads per multiprocessor; compute capability {gpu.cc} has "
                     f"{platform.threads}")
    if gpu.sum_bytes != bytes_of_sum(platform):
        found.append(f"a sum over rows: recorded {gpu.sum_bytes:,} bytes, replayed {bytes_of_sum(platform):,} for "
                     f"{gpu.sms} multiprocessors")
    if gpu.usable_bytes > gpu.driver_mib * 2**20:
        found.append(f"CUDA cannot offer {show_bytes(gpu.usable_bytes)} of {gpu.driver_mib:,} MiB")
    if model is None:
        return found
    for what, recorded, known in (("compute capability", gpu.cc, model.cc), ("multiprocessors", gpu.sms, model.sms)):
        if known is not None and recorded != known:
            found.append(f"{what}: recorded {recorded}, the {model.name} has {known}")
    peak = matmul_peak(model, "bfloat16") / 1e12
    if peak and gpu.matmul_tflops > 1.1 * peak:
        found.append(f"{gpu.matmul_tflops:g} TFLOP/s in matmuls are more than the {peak:g} of the {model.name}")
    if model.bandwidth_gbs and gpu.copy_gbs > 1.1 * model.bandwidth_gbs:
        found.append(f"{gpu.copy_gbs:g} GB/s are more than the {model.bandwidth_gbs:g} of the {model.name}")
    return found


def _impossible(record: GpuRecord) -> list[str]:
    """Timed runs that need more than the rate measured in plain matmuls."""
    found = []
    for run in record.runs:
        if run.tokens_per_s and record.gpu.matmul_tflops:
            config = RunConfig(**run.config)
            in_matmuls = config.gpt_config().count_params() - config.block_size * config.n_embd
            least = 6e-12 * in_matmuls * run.tokens_per_s
            if least > 1.1 * record.gpu.matmul_tflops:
                found.append(f"{run.name}: {run.tokens_per_s:,.0f} tokens/s need {least:,.0f} TFLOP/s; plain matmuls "
                             f"reached {record.gpu.matmul_tflops:g}")
    return found
