"""Records of GPUs: what is explained, what is rejected, and what an accepted one changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import take_record
from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.errors import DataError
from fitgpt.core.units import MiB
from fitgpt.hardware import gpus
from fitgpt.hardware.nvidia import GpuReading
from fitgpt.memory.platform import LARGE_WORKSPACE, Platform
from fitgpt.memory.timeline import replay
from fitgpt.planning import record_check
from fitgpt.planning.budget import named, on_device, with_record
from fitgpt.planning.gpu_record import MOST_BYTES, OWN, GpuRecord, GpuRun, RecordedGpu, keep, parse
from fitgpt.planning.record_check import PHASES, TIMED, cases, explain, platform_of
from fitgpt.tapes import engine as engine_tape

RECORDS = Path(__file__).parents[1] / "recorded" / "gpus"
RECORDED = sorted(RECORDS.glob("*.json"))
VERSIONS = {"fitgpt": "0.1.0", "torch": "2.11.0+cu130", "cuda": "13.0", "driver": "580.65.06", "python": "3.12.3"}
RTX_4070 = RecordedGpu("NVIDIA GeForce RTX 4070", "8.9", 46, 1536, 36 * MiB, 12282, 11800 * MiB, 2475,
                       matmul_tflops=52.0, copy_gbs=440.0)


def simulated(gpu: RecordedGpu, *names: str, **settings: object) -> GpuRecord:
    """The record that a GPU would give on which the planner is right; of all cases, or of those named. `settings`
    replace fields of its Platform."""
    record = GpuRecord("2026-11-18", VERSIONS, gpu)
    platform = replace(platform_of(record), **settings)  # type: ignore[arg-type]
    record = replace(record, gpu=replace(gpu, workspace_bytes=platform.workspace,
                                         sum_bytes=record_check.bytes_of_sum(platform)))
    wanted = [case for case in cases(platform) if case.name in names or not names]
    return replace(record, runs=tuple(simulated_run(case, platform) for case in wanted))


def simulated_run(case: GpuRun, platform: Platform) -> GpuRun:
    if case.name in TIMED:
        return replace(case, tokens_per_s=20_000.0)
    on = replace(platform, expandable=not case.native, kernel=case.kernel)
    run = resolve_run(RunConfig(**case.config), on)
    peaks = replay(engine_tape.write(run, on), expandable=on.expandable).peaks()
    phases = {name: {"allocated": peaks[name].allocated, "reserved": peaks[name].reserved} for name in PHASES}
    phases["train"] = {"allocated": max(peaks["train"].allocated, peaks["step"].allocated),
                       "reserved": peaks["step"].reserved}
    return replace(case, phases=phases, attention=engine_tape.attention_kernel(run, on), outside_bytes=212 * MiB + 1)


@pytest.fixture(scope="module")
def of_4070() -> GpuRecord:
    return simulated(RTX_4070)


# ---- the file


def test_a_record_survives_its_file_which_is_small(of_4070: GpuRecord) -> None:
    text = of_4070.to_json()
    assert parse(text) == of_4070
    assert len(text) < MOST_BYTES / 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', "null", '{"schema": 1, "gpu": 3}',
                                  " " * MOST_BYTES + "1"])
def test_another_file_is_an_error_not_a_traceback(text: str) -> None:
    with pytest.raises(DataError):
        parse(text)


@pytest.mark.parametrize("private", ["/home/ann/runs", "GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5 at C:\\ann", "a@b"])
def test_a_path_or_an_address_in_a_record_is_rejected(of_4070: GpuRecord, private: str) -> None:
    with pytest.raises(DataError, match="is not one that a record has"):
        parse(replace(of_4070, versions=VERSIONS | {"host": private}).to_json())


# ---- explained or rejected


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_record_in_the_repository_is_explained_and_in_the_table(path: Path) -> None:
    record = parse(path.read_text(encoding="utf-8"))
    found = explain(record)
    assert found.mismatches == ()
    assert all(figure.off == 0 for figure in found.figures if figure.name.endswith("reserved"))
    row = record.model
    assert row is not None
    assert take_record.row_of(record, row) == row


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_row_without_measured_memory_gets_it_from_its_record(path: Path) -> None:
    """The GPU as if nothing had been measured on it: from formulas to what is in the table, or less outside it."""
    record = parse(path.read_text(encoding="utf-8"))
    row = record.model
    assert row is not None
    assert row.sms is not None
    assert row.driver_mib is not None
    unmeasured = replace(row, usable_mib=gpus.usable_by_rule(row.driver_mib), usable_src="formula", recorded="",
                         outside_mib=gpus.outside_by_rule(row.sms), outside_src="formula", workspace_kib=None,
                         attention="", l2_mib=None, matmul_tflops=None, copy_gbs=None)
    found = take_record.row_of(record, unmeasured)
    assert (found.usable_mib, found.usable_src, found.outside_src) == (row.usable_mib, "seen", "seen")
    assert found.outside_mib is not None
    assert row.outside_mib is not None
    assert 0 <= row.outside_mib - found.outside_mib <= 16


def test_runs_as_the_planner_forecasts_them_are_explained_by_the_rules(of_4070: GpuRecord) -> None:
    found = explain(of_4070)
    assert found.mismatches == ()
    assert found.exact == len(found.figures) == 12 * sum(bool(run.phases) for run in of_4070.runs)
    assert found.platform == platform_of(of_4070)


def test_a_gpu_that_differs_from_the_rules_is_explained_by_its_workspace_and_kernel() -> None:
    blackwell = replace(RTX_4070, name="NVIDIA GeForce RTX 5070", cc="12.0", sms=48, driver_mib=12227)
    found = explain(simulated(blackwell, "eager", "small, biases, dropout", recorded_workspace=LARGE_WORKSPACE,
                              recorded_attention="efficient"))
    assert found.mismatches == ()
    assert (found.platform.recorded_workspace, found.platform.recorded_attention) == (LARGE_WORKSPACE, "efficient")


def test_figures_of_another_gpu_are_rejected(of_4070: GpuRecord) -> None:
    """Runs of a real record of an H200, in one that claims to be of an RTX 4070; and the other way round."""
    real = parse((RECORDS / "h200.json").read_text(encoding="utf-8"))
    of_h200 = replace(real, runs=tuple(run for run in real.runs if run.name in ("eager", "small, biases, dropout")))
    assert explain(of_h200).mismatches == ()
    with pytest.raises(DataError, match="eager, train reserved: recorded"):
        take_record.checked(replace(of_4070, runs=of_h200.runs))
    with pytest.raises(DataError, match="cuBLAS workspace: recorded"):  # explained by 4070's, but it was not measured
        take_record.checked(replace(of_h200, runs=of_4070.runs[:3]))
    everything_but_the_name = explain(replace(of_h200, gpu=replace(real.gpu, name=RTX_4070.name, driver_mib=12282)))
    assert any("multiprocessors" in text for text in everything_but_the_name.mismatches)
    with pytest.raises(DataError, match="143,771 MiB, and the RTX 4070 has 12,282"):  # it would replace that row
        take_record.checked(replace(of_h200, gpu=replace(real.gpu, name=RTX_4070.name)))
    of_60 = simulated(replace(RTX_4070, sms=60), "eager")
    scratch = replace(of_4070, gpu=replace(of_4070.gpu, sum_bytes=of_60.gpu.sum_bytes))
    assert any("a sum over rows" in text for text in explain(scratch).mismatches)


@pytest.mark.parametrize(("phase", "kind", "by"), [("train", "reserved", 2 * MiB), ("eval", "allocated", -MiB),
                                                   ("load", "reserved", 512)])
def test_an_altered_run_is_rejected_with_the_figure(of_4070: GpuRecord, phase: str, kind: str, by: int) -> None:
    first, second, *_ = of_4070.runs
    altered = {name: dict(peaks) for name, peaks in first.phases.items()}
    altered[phase][kind] += by
    with pytest.raises(DataError, match=f"eager, {phase} {kind}: recorded {altered[phase][kind]:,} bytes"):
        take_record.checked(replace(of_4070, runs=(replace(first, phases=altered), second)))


@pytest.mark.parametrize("figures", [{"matmul_tflops": 700.0}, {"copy_gbs": 4000.0}, {"usable_bytes": 13000 * MiB},
                                     {"threads": 2048}, {"workspace_bytes": LARGE_WORKSPACE}])
def test_impossible_figures_are_rejected(of_4070: GpuRecord, figures: dict[str, object]) -> None:
    assert explain(replace(of_4070, gpu=replace(of_4070.gpu, **figures))).mismatches  # type: ignore[arg-type]


def test_a_speed_beyond_the_matmul_rate_is_rejected(of_4070: GpuRecord) -> None:
    runs = tuple(replace(run, tokens_per_s=1e6) if run.name == "timed 124M" else run for run in of_4070.runs)
    assert any(text.startswith("timed 124M: 1,000,000 tokens/s need") for text in explain(replace(
        of_4070, runs=runs)).mismatches)


def test_a_record_without_runs_or_with_some_of_them_is_rejected(of_4070: GpuRecord) -> None:
    assert explain(replace(of_4070, runs=())).mismatches == ("The record has no run with figures of memory.",)
    with pytest.raises(DataError, match="not complete: timed 11M"):
        take_record.checked(replace(of_4070, runs=of_4070.runs[:-1]))


# ---- what an accepted record changes


def test_the_row_gets_the_recorded_figures_with_source_and_date(of_4070: GpuRecord) -> None:
    model = of_4070.model
    assert model is not None
    assert (model.usable_src, model.outside_src) == ("formula", "formula")
    table = take_record.TABLE.read_text(encoding="utf-8")
    after = take_record.updated(table, of_4070.apply(model, "seen"))
    changed = [line for line in after.splitlines() if line not in table.splitlines()]
    assert changed == ["RTX 4070,nvidia,8.9,12,12282,seen,11800,seen,213,seen,46,2475,504,58.3,formula,yes,,"
                       "\"2026-11-18, torch 2.11\",8320,flash,36,52,440"]
    assert len(after.splitlines()) == len(table.splitlines())


def test_a_gpu_that_is_not_in_the_table_gets_a_row() -> None:
    new = simulated(replace(RTX_4070, name="NVIDIA GeForce RTX 4075"), "eager")
    assert new.model is None
    last = take_record.updated("name\n", new.apply(None, "seen")).splitlines()[-1]
    assert last.startswith("RTX 4075,nvidia,8.9,12,12282,seen,11800,seen,213,seen,46,2475,440,52,seen,yes")


def test_a_recorded_kernel_and_workspace_hold_for_their_version_of_torch(of_4070: GpuRecord) -> None:
    row = replace(of_4070, gpu=replace(of_4070.gpu, workspace_bytes=LARGE_WORKSPACE)).apply(of_4070.model, "seen")
    assert with_record(Platform((8, 9), "2.11"), row).workspace == LARGE_WORKSPACE
    assert with_record(Platform((8, 9), "2.13"), row).workspace != LARGE_WORKSPACE


# ---- the user's own machine


def test_plans_on_this_machine_use_its_record_at_once(of_4070: GpuRecord, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path / "home"))
    reading = GpuReading(0, RTX_4070.name, cc="8.9", total_bytes=12282 * MiB, reserved_bytes=482 * MiB, used_bytes=0)
    before = on_device(reading)
    assert keep(of_4070) is not None
    after = on_device(reading)
    assert before.budget.outside != after.budget.outside == 213 * MiB
    assert f"{OWN}, 2026-11-18, torch 2.11" in " ".join(after.budget.sources)
    by_name = named("4070", others=None, budget=None)
    assert by_name.budget.usable == 11800 * MiB
    assert OWN in " ".join(by_name.budget.sources)
    assert named("4090", others=None, budget=None).budget.card == "RTX 4090"


def test_a_device_of_no_model_is_planned_with_its_own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path))
    unknown = simulated(replace(RTX_4070, name="Orin", cc="8.7", sms=8), "eager")
    keep(unknown)
    target = on_device(GpuReading(0, "Orin", cc="8.7", total_bytes=12282 * MiB, used_bytes=0))
    assert target.budget.outside == 213 * MiB
    assert target.card is not None
    assert target.card.sms == 8


def test_a_damaged_store_is_never_a_reason_for_a_plan_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITGPT_HOME", str(tmp_path))
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "a.json").write_bytes(b"\xff{")
    (tmp_path / "gpus" / "b.json").mkdir()
    with open(tmp_path / "gpus" / "c.json", "wb") as file:
        file.truncate(2**42)  # more than the memory
    assert named("4070", others=None, budget=None).card == gpus.find("4070")
