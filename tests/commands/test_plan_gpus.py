"""`fitgpt plan` for the GPU in this machine, for one by name and for all that are known."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.run_config import RunConfig, resolve_run
from fitgpt.core.units import GiB, MiB, show_bytes
from fitgpt.hardware import gpus, nvidia
from fitgpt.hardware.nvidia import GpuProcess, GpuReading, Survey
from fitgpt.memory.platform import Platform
from fitgpt.planning import budget, forecast
from fitgpt.planning.plan import same_tape
from tests.plan_command import SMALL

# ---- one GPU


def gpu(**more: Any) -> GpuReading:
    figures = dict(index=0, name="NVIDIA GeForce RTX 4070", cc="8.9", total_bytes=12282 * MiB, used_bytes=2 * GiB,
                   free_bytes=9 * GiB, reserved_bytes=400 * MiB, processes=(GpuProcess(812, "Xorg", GiB, "desktop"),))
    return GpuReading(**{**figures, **more})  # type: ignore[arg-type]


def test_the_installed_gpu_is_planned_with_the_memory_others_use(run_plan: Any,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((gpu(),)))
    document = run_plan(*SMALL, "--json").json
    assert document["gpu"] == "RTX 4070"
    assert document["usable_bytes"] == (12282 - 400) * MiB
    assert document["others_bytes"] == 2 * GiB
    output = " ".join(run_plan(*SMALL).out.split())
    assert "Other processes use 2.00 GiB of it now: Xorg 1.00 GiB." in output
    for size in ("1GiB", "1024"):  # without a unit, MiB
        assert run_plan(*SMALL, f"--others={size}", "--json").json["others_bytes"] == GiB


def test_of_several_gpus_the_one_with_most_free_memory_or_the_one_named(run_plan: Any,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    both = (gpu(), gpu(index=1, name="NVIDIA GeForce RTX 3090", total_bytes=24576 * MiB, free_bytes=23 * GiB))
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey(both))
    assert run_plan(*SMALL, "--json").json["gpu"] == "RTX 3090"
    assert run_plan(*SMALL, "--device=cuda:0", "--json").json["gpu"] == "RTX 4070"
    answer = run_plan(*SMALL, "--device=cuda:2")
    assert answer.code == 2
    assert "cuda:1 (NVIDIA GeForce RTX 3090)" in answer.err


def test_an_unknown_gpu_gets_the_largest_context_of_its_size(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((gpu(name="NVIDIA Odd 9", cc="9.9"),)))
    answer = run_plan(*SMALL, "--json").json
    assert answer["gpu"] == "NVIDIA Odd 9"
    known = [card.outside_mib for card in gpus.load() if card.usable_mib and card.usable_mib < 12000]
    assert answer["outside_bytes"] == max(mib for mib in known if mib) * MiB


def test_without_a_gpu_the_error_asks_for_a_name_or_a_budget(run_plan: Any) -> None:
    answer = run_plan(*SMALL)
    assert answer.code == 2
    assert "--gpu 4070" in answer.err
    assert "--budget" in answer.err
    alone = run_plan(*SMALL, "--budget=6GiB", "--json")
    assert (alone.code, alone.json["gpu"], alone.json["budget_bytes"]) == (0, None, 6 * GiB)


def test_a_budget_without_a_gpu_names_no_gpu(run_plan: Any) -> None:
    document = run_plan(*SMALL, "--budget=6GiB", "--json").json
    output = " ".join(run_plan(*SMALL, "--budget=6GiB").out.split())
    assert f"(a budget of 6.00 GiB, {show_bytes(document['outside_bytes'])} outside the allocator): " in output
    assert f": headroom {show_bytes(document['headroom_bytes'])}." in output
    tight = " ".join(run_plan(*SMALL, "--budget=300MiB").out.split())
    for said in (output, tight):
        assert not [claim for claim in ("else on the card", "on this card", " usable") if claim in said]
    assert "everything else on the GPU stays under" in " ".join(run_plan(*SMALL, "--gpu=4070").out.split())


def test_other_vendors_give_an_error_about_what_is_not_known(run_plan: Any) -> None:
    amd = run_plan(*SMALL, "--gpu=mi300x")
    assert amd.code == 2
    assert "has not been measured" in amd.err
    assert run_plan(*SMALL, "--gpu=mi300x", "--budget=100GiB").code == 0
    apple = run_plan(*SMALL, "--gpu=Apple M1", "--budget=8GiB")
    assert (apple.code, "allocator for Apple GPUs" in apple.err) == (2, True)


def test_the_installed_torch_is_assumed_unless_another_is_given(run_plan: Any) -> None:
    installed = ".".join(version("torch").split(".")[:2])
    assert run_plan(*SMALL, "--gpu=4070", "--json").json["torch"] == installed
    document = run_plan(*SMALL, "--gpu=4070", "--torch=2.9.1", "--json").json
    assert document["torch"] == "2.9"
    assert "nearest known version" in document["assumes"]["torch"]


def test_the_users_own_allocator_settings_are_kept(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((gpu(),)))
    assert run_plan(*SMALL, "--json").json["assumes"]["allocator"] == "expandable segments"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert run_plan(*SMALL, "--json").json["assumes"]["allocator"] != "expandable segments"


def test_the_installed_gpu_is_planned_with_its_own_multiprocessors() -> None:
    card = gpus.find("RTX 3060 12GB")
    seen = GpuReading(0, "NVIDIA GeForce RTX 3060", "GPU-1", "8.6", total_bytes=12288 * MiB, used_bytes=0)
    assert budget.on_device(seen).platform.sms == card.sms == budget.on_card(card).platform.sms
    assert budget.on_device(replace(seen, name="NVIDIA Nonesuch")).platform.sms == Platform.sms


# ---- all GPUs


def test_all_cards_agrees_with_the_plan_of_each_gpu(run_plan: Any) -> None:
    argv = [*SMALL, "--n_embd=1024", "--batch_size=32", "--n_layer=16"]
    answer = run_plan(*argv, "--all-cards", "--json")
    rows = {row["gpu"]: row for row in answer.json["gpus"]}
    assert list(rows) == [card.name for card in gpus.load()]
    assert {row["verdict"] for row in rows.values()} == {"fits", "tight", "does_not_fit", None}
    for name in ("RTX 4070", "T4", "H200", "RTX 5060", "GTX 1080"):
        one = run_plan(*argv, f"--gpu={name}", "--json").json
        assert [rows[name][key] for key in ("needs_bytes", "headroom_bytes", "verdict", "fits")] == [
            one[key] for key in ("needs_bytes", "headroom_bytes", "verdict", "fits")]
    assert rows["MI300X"]["problem"] == "not known"


def test_leave_applies_to_every_gpu(run_plan: Any) -> None:
    rows = [run_plan(*SMALL, flag, "--all-cards", "--json").json["gpus"] for flag in ("--others=6GiB", "--leave=6GiB")]
    assert rows[0] == rows[1]


def test_all_cards_states_what_an_unsupported_gpu_needs(run_plan: Any) -> None:
    flags = ["--step_in_backward", "--gradient_accumulation_steps=1", "--grad_clip=0"]
    document = run_plan(*SMALL, *flags, "--all-cards", "--json").json
    rows = {row["gpu"]: row for row in document["gpus"]}
    assert rows["T4"]["problem"] == "needs --dtype=float32"
    assert rows["RTX 4070"]["fits"]
    assert run_plan(*SMALL, *flags, "--gpu=t4").code == 2
    assert run_plan(*SMALL, *flags, "--gpu=t4", "--dtype=float32").code == 0


def test_gpus_that_share_a_replay_have_the_same_tape() -> None:
    config = RunConfig(n_layer=1, n_head=2, n_embd=64, batch_size=2, block_size=64, vocab_size=64)
    seen: dict[Any, Any] = {}
    for card in gpus.load():
        if card.vendor == "nvidia":
            platform = budget.on_card(card, torch="2.11").platform
            for trainer in ("fitgpt", "nanogpt"):
                run = resolve_run(config, platform, trainer)
                tape = forecast.write_tape(run, platform, trainer)
                assert seen.setdefault((trainer, same_tape(run, platform)), tape) == tape
    assert len(seen) > 4


def test_every_gpu_that_fits_has_a_speed(run_plan: Any) -> None:
    for trainer in ("fitgpt", "nanogpt"):
        lines = run_plan(*SMALL, "--all-cards", f"--trainer={trainer}").out.splitlines()
        head, *rows = [line for line in lines if line.startswith("GPU ") or "  fits" in line]
        assert head.endswith("1,000 tokens/s")
        assert rows
        assert all(re.search(r"  [\d,.]+–[\d,.]+$", row) for row in rows)


def test_all_cards_with_a_length_shows_hours(run_plan: Any) -> None:
    argv = [*SMALL[:-1], "--all-cards", "--tokens=10B"]
    head, row = (line for line in run_plan(*argv).out.splitlines() if line.startswith(("GPU ", "RTX 4070  ")))
    assert head.endswith("hours")
    rows = run_plan(*argv, "--json").json["gpus"]
    found = next(each for each in rows if each["gpu"] == "RTX 4070")
    (slow, fast), (least, most) = found["tokens_per_s"], found["hours"]
    assert 0 < slow <= fast
    assert least == pytest.approx(1e10 / fast / 3600, rel=1e-5)
    assert most == pytest.approx(1e10 / slow / 3600, rel=1e-5)
    assert row.endswith(f"  {least:,.1f}–{most:,.1f}")


@pytest.mark.parametrize("columns", [40, 60])
@pytest.mark.parametrize(("command", "argv"), [
    ("plan", ["--gpu=4070", "--options"]), ("plan", ["--all-cards"]), ("cards", []),
    ("plan", ["--gpu=4070", "--batch_size=64", "--trainer=nanogpt"]), ("fit", ["--gpu=4070"])])
def test_tables_fit_a_narrow_terminal(run_plan: Any, monkeypatch: pytest.MonkeyPatch, columns: int, command: str,
                                      argv: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    config = [] if command == "cards" else [str(Path(__file__).parents[2] / "config" / "gpt2_124m.py"), "--n_layer=2"]
    output = run_plan(*config, *argv, command=command).out
    table = output.partition("To write this config")[0]  # the command below it is printed whole, to be copied
    assert table
    flags = re.compile(r" +--\S+")  # one that is longer than the line is not broken
    assert [line for line in table.splitlines() if len(line) > columns and not flags.fullmatch(line)] == []


def test_a_narrow_table_keeps_what_matters(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output = run_plan(*SMALL, "--gpu=4070").out
    assert re.search(r"^MiB +reserved +process$", output, re.MULTILINE)
    assert re.search(r"^RTX 4070\n? .*fits", run_plan(*SMALL, "--all-cards").out, re.MULTILINE)
    assert re.search(r"^RTX 4070  .* 11.65 GiB$", run_plan("4070", command="cards").out, re.MULTILINE)
    monkeypatch.setenv("COLUMNS", "50")
    assert re.search(r"^GPU +headroom", run_plan(*SMALL, "--all-cards").out, re.MULTILINE)
    for columns, has_speeds in ((60, True), (48, False)):  # what is left out is not explained
        monkeypatch.setenv("COLUMNS", str(columns))
        output = run_plan(*SMALL, "--gpu=4070", "--options").out
        assert (bool(re.search("needs +speed", output)), "✓: fits; speed:" in output) == (has_speeds, has_speeds)


def test_an_ambiguous_gpu_name_means_the_smallest_and_a_note_names_the_others(run_plan: Any) -> None:
    notes = {name: [note for note in run_plan(*SMALL, f"--gpu={name}", "--json").json["notes"] if "also means" in note]
             for name in ("4060 ti", "4060 ti 16gb", "4070")}
    expected = "'4060 ti' also means the RTX 4060 Ti 16GB: the smallest is taken unless the name says which."
    assert notes == {"4060 ti": [expected], "4060 ti 16gb": [], "4070": []}


# ---- several GPUs, one rank each


def test_each_rank_is_planned_with_its_share_of_the_micro_batches_and_nccls_memory(run_plan: Any) -> None:
    one = run_plan(*SMALL, "--gpu=4070", "--gradient_accumulation_steps=1", "--json").json
    answer = run_plan(*SMALL, "--gpus=2x4070", "--gradient_accumulation_steps=2", "--json")
    assert answer.code == 0
    ranks = answer.json["ranks"]
    assert [(rank["rank"], rank["gpu"], rank["verdict"]) for rank in ranks] == [
        (0, "RTX 4070", "fits"), (1, "RTX 4070", "fits")]
    assert ranks[0]["phases"]["train"] == one["phases"]["train"]  # one micro-batch each: no byte for communication
    assert ranks[0]["outside_bytes"] > one["outside_bytes"]
    assert any("NCCL is estimated to use" in source and "Not measured" in source for source in answer.json["sources"])
    gloo = run_plan(*SMALL, "--gpus=2x4070", "--backend=gloo", "--json").json["ranks"]
    assert gloo[0]["outside_bytes"] == one["outside_bytes"]


def test_a_plan_exits_with_1_if_any_rank_does_not_fit(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    full = gpu(index=1, used_bytes=11 * GiB, free_bytes=GiB)
    monkeypatch.setattr(nvidia, "survey", lambda env=None: Survey((gpu(used_bytes=0), full)))
    answer = run_plan(*SMALL, "--gpus=all", "--json")
    assert answer.code == 1
    assert [rank["verdict"] for rank in answer.json["ranks"]] == ["fits", "does_not_fit"]
    table = " ".join(run_plan(*SMALL, "--gpus=0,1").out.split())
    assert "2 ranks" in table
    assert "does not fit" in table


def test_gpus_that_cannot_be_planned_for_are_rejected_with_a_fix(run_plan: Any) -> None:
    for arguments, what in ((["--gpus=2x4070", "--gpu=4070"], "for several"), (["--gpus=2xcpu"], "NVIDIA GPUs"),
                            (["--gpus=2x4070", "--trainer=nanogpt"], "DDP"), (["--gpus=0,0"], "twice"),
                            (["--gpus=3x4070"], "--gradient_accumulation_steps=39")):
        answer = run_plan(*SMALL, *arguments)
        assert answer.code == 2
        assert what in answer.err
