"""The memory check before a run: in the supervisor by the driver's reading, in the worker by torch's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.command_options import PlanArguments
from fitgpt.config.fields import Assignment
from fitgpt.config.run_config import RunConfig, check_resume, resolve_run
from fitgpt.core.errors import DeviceError, UsageError
from fitgpt.core.extras import install_command
from fitgpt.core.units import GiB, MiB, parse_bytes
from fitgpt.engine import oom
from fitgpt.engine.device import DeviceChoice
from fitgpt.hardware import host, nvidia
from fitgpt.hardware.nvidia import GpuProcess, GpuReading, Survey
from fitgpt.planning import budget as place
from fitgpt.planning import forecast, plan_file
from fitgpt.planning.budget import apply_limits, on_device
from fitgpt.planning.plan import plan_for
from fitgpt.planning.plan_file import FallbackPlan
from fitgpt.planning.verdict import Verdict
from fitgpt.training import device_memory, memory_check, supervisor
from fitgpt.training.device_memory import DeviceMemoryPlan
from fitgpt.training.memory_check import check
from tests.helpers import TINY, write_dataset

TOTAL, RESERVED = 12282 * MiB, 302 * MiB
NEEDS_5_3 = dict(batch_size=16, gradient_accumulation_steps=32, dataset="nowhere", vocab_size=50304)


def reading(used: int = 0, index: int = 0, *processes: GpuProcess) -> GpuReading:
    return GpuReading(index, "NVIDIA GeForce RTX 4070", f"GPU-{index}", "8.9", "580.65", TOTAL,
                      TOTAL - RESERVED - used, used, RESERVED, processes)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the driver says, look after look; the last answer stays. Each look reads it once."""
    def seen(*looks: tuple[GpuReading, ...]) -> None:
        answers = [Survey(look) for look in looks]
        monkeypatch.setattr(nvidia, "survey", lambda env=None: answers.pop(0) if len(answers) > 1 else answers[0])

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    return seen


def test_a_run_that_fits_returns_what_others_use_of_each_gpu(cards: Callable[..., None]) -> None:
    cards((reading(2 * GiB), reading(GiB, 1)))
    assert check(RunConfig(**NEEDS_5_3)) == {"GPU-0": 2 * GiB, "GPU-1": GiB}


def test_a_run_whose_plan_is_tight_starts(cards: Callable[..., None]) -> None:
    cards((reading(),))
    config = RunConfig(**NEEDS_5_3)
    roomy = plan_for(config, on_device(reading()))
    needs = -(-(roomy.forecast.needs + roomy.budget.outside) // MiB)
    for budget, verdict in ((needs, Verdict.TIGHT), (needs + 200, Verdict.FITS)):
        capped = replace(config, budget=f"{budget}MiB")
        target = on_device(reading())
        assert plan_for(capped, target._replace(budget=apply_limits(capped, target.budget))).verdict is verdict
        assert check(capped) == {"GPU-0": 0}


def test_a_run_that_does_not_fit_names_other_processes_and_a_change_that_works(cards: Callable[..., None]) -> None:
    busy = reading(9 * GiB, 0, GpuProcess(77, "blender", 9 * GiB, "app"))
    cards((busy,))
    with pytest.raises(DeviceError) as raised:
        check(RunConfig(**NEEDS_5_3))
    said = raised.value
    assert said.exit_code == 5
    assert "does not fit the RTX 4070: it needs 5." in said.what
    assert "9.00 GiB used by others" in said.what
    assert "blender 9.00 GiB" in said.what
    assert "Add --wait" in said.fix
    flags = said.fix.removeprefix("Add ").partition(";")[0].partition(".\n")[0].split()
    changed = replace(RunConfig(**NEEDS_5_3), **{each.key: each.value for each in walk(flags, RunConfig)})
    assert changed.tokens_per_step == RunConfig(**NEEDS_5_3).tokens_per_step
    check(changed)  # what it says works


def test_if_no_single_change_is_enough_several_are_named(cards: Callable[..., None]) -> None:
    cards((reading(10 * GiB),))
    config = RunConfig(**NEEDS_5_3)
    with pytest.raises(DeviceError) as raised:
        check(config)
    flags = next(line for line in raised.value.fix.splitlines() if line.startswith("Add --batch_size")).removeprefix(
        "Add ").removesuffix(".").split()
    assert len(flags) > 3
    check(replace(config, **{each.key: each.value for each in walk(flags, RunConfig)}))  # what it says works
    cards((reading(11 * GiB + 300 * MiB),))
    with pytest.raises(DeviceError) as raised:
        check(config)
    assert "`fitgpt fit` with the same options, that flag and -o" in raised.value.fix


def test_a_run_that_would_not_fit_an_empty_gpu_does_not_wait(cards: Callable[..., None]) -> None:
    cards((reading(),))
    with pytest.raises(DeviceError) as raised:
        check(RunConfig(**{**NEEDS_5_3, "batch_size": 64, "saved_activations": "all"}, wait=True))
    assert "--wait" not in raised.value.fix


def test_leave_and_budget_reduce_the_usable_memory(cards: Callable[..., None]) -> None:
    cards((reading(),))
    check(RunConfig(**NEEDS_5_3, leave="5GiB"))
    with pytest.raises(DeviceError, match="7GiB to be left free"):
        check(RunConfig(**NEEDS_5_3, leave="7GiB"))
    check(RunConfig(**NEEDS_5_3, budget="7GiB"))
    with pytest.raises(DeviceError, match="a budget of 5GiB"):
        check(RunConfig(**NEEDS_5_3, budget="5GiB"))
    with pytest.raises(UsageError, match=r"more than the 11.70 GiB that CUDA offers"):
        check(RunConfig(**NEEDS_5_3, budget="13GiB"))


def test_wait_reports_once_per_minute_and_ends_when_there_is_room(cards: Callable[..., None]) -> None:
    cards(*[(reading(9 * GiB),)] * 30, (reading(),))
    slept: list[float] = []
    said: list[str] = []
    check(RunConfig(**NEEDS_5_3, wait=True), sleep=slept.append, say=said.append)
    assert sum(slept) == 150.0
    assert len(said) == 3  # at 0, 60 and 120 s
    assert "waiting for memory of the RTX 4070: the run needs 5." in said[0]
    assert "Other processes use 9.00 GiB" in said[0]


def test_the_check_and_the_worker_use_the_same_reading(cards: Callable[..., None]) -> None:
    """One look at the driver says both: another a moment later may say something else."""
    cards((reading(2 * GiB),), (reading(11 * GiB),))
    assert check(RunConfig(**NEEDS_5_3)) == {"GPU-0": 2 * GiB}


def test_the_gpu_with_the_most_free_memory_is_planned_for(cards: Callable[..., None]) -> None:
    cards((reading(9 * GiB), reading(GiB, 1)))
    check(RunConfig(**NEEDS_5_3))
    with pytest.raises(DeviceError):
        check(RunConfig(**NEEDS_5_3, device="cuda:0"))
    check(RunConfig(**NEEDS_5_3, device="cuda:1"))


@pytest.mark.parametrize("config", [dict(device="cpu"), dict(eval_only=True), dict(device="cuda:7")])
def test_cases_that_only_torch_can_check_pass(cards: Callable[..., None], config: dict[str, Any]) -> None:
    cards((reading(11 * GiB),))
    check(RunConfig(**NEEDS_5_3, **config))


def test_a_missing_bitsandbytes_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(device="cpu", optimizer="adam8bit", adam8bit="bitsandbytes")
    monkeypatch.setattr(memory_check, "find_spec", {"bitsandbytes": None}.__getitem__)
    with pytest.raises(UsageError, match="bitsandbytes, which is not installed") as caught:
        check(config)
    assert caught.value.fix == f"{install_command('bitsandbytes')}, or --adam8bit=own"
    check(replace(config, adam8bit="own"))
    check(replace(config, eval_only=True))  # which has no optimizer


def test_a_resume_may_change_budget_leave_wait_step_up_and_rehearse() -> None:
    before = RunConfig().to_dict()
    check_resume(before, {**before, "budget": "8GiB", "leave": "2GiB", "wait": True, "step_up": True,
                          "rehearse": False})
    for wrong in ("banana", "0GiB"):
        with pytest.raises(UsageError, match="leave"):
            RunConfig(leave=wrong)
    assert {each.key: each.value for each in walk(["--budget=8GiB"], PlanArguments)} == {"budget": "8GiB"}


def test_the_cap_is_what_the_allocator_may_reserve(cards: Callable[..., None]) -> None:
    found = on_device(reading(GiB))
    budget = place.apply_limits(RunConfig(leave="2GiB"), found.budget)
    assert budget.budget == TOTAL - RESERVED - 3 * GiB
    assert budget.reserve_limit == budget.budget - budget.outside
    assert place.apply_limits(RunConfig(budget="4GiB", leave="2GiB"), found.budget).budget == parse_bytes("4GiB")


def test_the_cap_is_never_below_the_requested_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes a fraction and computes bytes from it."""
    total, fractions, generator = TOTAL - RESERVED, list[float](), random.Random(0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    sizes = [*(generator.randrange(1, total) for _ in range(500)), total]
    for nbytes in sizes:
        oom.cap_memory("cuda:0", nbytes)
    assert [nbytes for nbytes, share in zip(sizes, fractions, strict=True)
            if not nbytes <= int(share * total) <= min(nbytes + 512, total)] == []


def test_free_memory_is_unknown_without_a_gpu() -> None:
    assert oom.room("cpu") is None


# ---- plan.json


@pytest.fixture
def plan(tmp_path: Path, cards: Callable[..., None]) -> Callable[..., str]:
    """A plan.json for an RTX 4070, as `fit` writes them."""
    cards((reading(),))
    config = RunConfig(**{**TINY, "dataset": write_dataset(tmp_path / "data"), "out_dir": str(tmp_path / "out"),
                          "device": "auto"})
    found = on_device(reading())

    needs = forecast.replay_run(resolve_run(config, found.platform), found.platform).needs

    def write(**changes: Any) -> str:
        document = {"schema": 2, "config": config.to_dict(), "gpu": "RTX 4070", "budget": found.budget._asdict(),
                    "forecast": {"needs_bytes": needs},
                    "ladder": [{"changes": {"batch_size": 2, "gradient_accumulation_steps": 4}, "needs_bytes": 5,
                                "why": "smaller"}], **changes}
        (tmp_path / "plan.json").write_text(json.dumps(document))
        return str(tmp_path / "plan.json")

    return write


def started(monkeypatch: pytest.MonkeyPatch, *flags: str) -> supervisor.WorkerConfig:
    given: list[supervisor.WorkerConfig] = []
    monkeypatch.setattr(supervisor, "run_worker", lambda worker: (given.append(worker), (0, {}))[1])
    assert supervisor.supervise(walk(list(flags), RunConfig)) == 0
    return given[0]


def test_a_plan_json_sets_the_options_and_the_fallback_plans(plan: Callable[..., str],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    worker = started(monkeypatch, f"--plan={plan()}", "--max_iters=7")
    assert worker.config["batch_size"] == TINY["batch_size"]
    assert worker.config["max_iters"] == 7
    assert worker.config["plan"] == ""  # a resumed run needs no file
    smaller = FallbackPlan({"batch_size": 2, "gradient_accumulation_steps": 4}, 5, "smaller")
    assert worker.fallbacks == [smaller._asdict()]


@pytest.mark.parametrize(("changes", "flags", "message"), [
    ({}, ["--batch_size=8"], "it has batch_size=4, and --batch_size=8 says 8"),
    ({"gpu": "RTX 3060 12GB"}, [], "made for an RTX 3060 12GB, and here is an RTX 4070"),
    ({"forecast": {"needs_bytes": 123 * MiB}}, [], "it says the run needs 123.0 MiB, and here"),
    ({}, ["--device=cpu"], "the run is not on an NVIDIA GPU"),
])
def test_differences_from_the_plan_json_are_errors(plan: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
                                                   changes: dict[str, Any], flags: list[str], message: str) -> None:
    with pytest.raises(DeviceError) as raised:
        started(monkeypatch, f"--plan={plan(**changes)}", *flags)
    assert message in raised.value.what
    assert raised.value.exit_code == 5


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is not a plan"), ("[]", "has no config"), ('{"schema": 1, "config": {}}', "schema 1"),
    ('{"config": {"batch_size": -3}}', "batch_size"), ("[" * 100_000, "is not a plan"),
])
def test_a_file_that_is_no_plan_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        plan_file.read(str(tmp_path / "plan.json"))
    with pytest.raises(UsageError, match="No such file"):
        plan_file.read(str(tmp_path / "none.json"))


def test_a_config_given_as_plan_names_the_plan_json(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("n_layer = 2")
    for fix in ("fitgpt fit -o ", "--plan "):
        with pytest.raises(UsageError) as raised:
            plan_file.read(str(tmp_path / "mine.py"))
        assert fix in raised.value.fix
        (tmp_path / "mine.plan.json").write_text("{}")


@pytest.mark.parametrize(("changes", "message"), [
    ({"batch_size": "two"}, "a fallback plan: batch_size='two': batch_size takes a whole number"),
    ({"batch_size": 0}, "batch_size"), ({"offload": "cloud"}, "offload is one of"),
    ({"n_layer": 1}, "a fallback plan changes n_layer"), ({"weights": "bfloat16"}, "a fallback plan changes weights"),
    ({"saved_activations": "3*input"}, "saved_activations"),
    ({"offload": "gradients", "cuda_graphs": True}, "offload=gradients"),
    ({"batch_size": 2}, "64 tokens per step, and the run has 128"),
])
def test_a_fallback_plan_that_cannot_work_is_an_error_before_the_run(
        plan: Callable[..., str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str) -> None:
    path = plan(ladder=[{"changes": changes, "needs_bytes": 5, "why": "smaller"}])
    with pytest.raises(UsageError) as raised:
        started(monkeypatch, f"--plan={path}")
    assert message in raised.value.what
    assert path in raised.value.what


def test_only_the_config_of_a_plan_json_is_required(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"config": {"batch_size": 3, "not_a_knob": 1}, "ladder": ["?"]}))
    read = plan_file.read(str(tmp_path / "plan.json"))
    assert (read.options, read.card, read.needs, read.fallback_plans) == ({"batch_size": 3}, "", None, None)
    said = [Assignment("plan", read.path, "--plan"), Assignment("learning_rate", 1.0, "--learning_rate=1")]
    assert [each.key for each in plan_file.with_plan(said)] == ["batch_size", "plan", "learning_rate"]


def test_memory_check_supervisor_and_rehearse_do_not_import_torch() -> None:
    script = ("import sys, fitgpt.training.memory_check, fitgpt.planning.plan_file\n"
              "import fitgpt.commands.rehearse, fitgpt.training.supervisor\n"
              "assert not {'torch', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


# ---- in the process that trains: the GPU as torch sees it


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[DeviceMemoryPlan, list[int]]]:
    """A run on an RTX 4070 that torch sees, of which others held 2 GiB before; and the caps that were set."""
    def run(spills: bool = False, **options: Any) -> tuple[DeviceMemoryPlan, list[int]]:
        caps: list[int] = []
        monkeypatch.setattr(oom, "is_nvidia", lambda device: True)
        monkeypatch.setattr(oom, "gpu_reading", lambda device, others: (reading(others["GPU-0"]), 46))
        monkeypatch.setattr(oom, "cap_memory", lambda device, nbytes: caps.append(nbytes))
        monkeypatch.setattr(device_memory, "triton_works", lambda: True)
        monkeypatch.setattr(oom, "may_spill", lambda: spills)
        choice = DeviceChoice("cuda:0", "NVIDIA GeForce RTX 4070", "bfloat16", True, (), None, None)
        config = RunConfig(**{**NEEDS_5_3, "dtype": "bfloat16"}, **options)
        return device_memory.plan_on_device(config, choice, {"GPU-0": 2 * GiB}), caps

    return run


def test_the_allocator_is_capped_for_budget_leave_and_drivers_that_spill(
        planned: Callable[..., tuple[DeviceMemoryPlan, list[int]]]) -> None:
    free, caps = planned()
    assert caps == []
    assert free.plan is not None
    assert free.plan.budget.others == 2 * GiB
    outside = free.plan.budget.outside
    assert planned(budget="8GiB")[1] == [8 * GiB - outside]
    assert planned(leave="1GiB")[1] == [TOTAL - RESERVED - 3 * GiB - outside]
    assert planned(spills=True)[1] == [TOTAL - RESERVED - 2 * GiB - outside]


def test_a_run_that_does_not_fit_by_torchs_reading_is_an_error(
        planned: Callable[..., tuple[DeviceMemoryPlan, list[int]]]) -> None:
    with pytest.raises(DeviceError, match="does not fit the RTX 4070"):
        planned(leave="5GiB")
    assert planned(leave="5GiB", eval_only=True)[0].plan is not None  # which trains nothing


def test_room_respects_leave_and_the_cap(
        planned: Callable[..., tuple[DeviceMemoryPlan, list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "room", lambda device: 7 * GiB)
    assert planned()[0].room() == 7 * GiB
    assert planned(leave="1GiB")[0].room() == 6 * GiB
    capped, (cap,) = planned(budget="6.5GiB")
    assert capped.room() == cap < 7 * GiB


@pytest.mark.parametrize(("there", "offloads"), [(None, True), (64 * GiB, True), (GiB, False)])
def test_fallback_plans_offload_only_if_there_is_cpu_ram(
        planned: Callable[..., tuple[DeviceMemoryPlan, list[int]]], monkeypatch: pytest.MonkeyPatch, there: int | None,
        offloads: bool) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: there)
    assert any("offload" in plan.changes for plan in planned()[0].ladder()) is offloads
