"""`fitgpt plan`: the verdict and what it rests on, the changes that would make a run fit, the page of a step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fitgpt
from fitgpt.commands import plan
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, MiB
from tests.plan_command import CONFIG, NOTES_77M, NOTES_CONFIG, SMALL, write_chars

KEYS = ["schema", "trainer", "gpu", "torch", "params", "usable_bytes", "others_bytes", "budget_bytes", "outside_bytes",
        "reserve_limit_bytes", "needs_bytes", "headroom_bytes", "verdict", "fits", "tight", "not_seen", "process_bytes",
        "gpu_bytes", "phases", "peak", "owners", "reserved_bytes", "step_seconds", "assumes", "track_record", "changes"]
CHANGE_KEYS = ["flags", "paste", "what", "costs", "needs_bytes", "headroom_bytes", "verdict", "same_training", "basis",
               "step_seconds"]
PHASES = ["load", "first_eval", "first_train", "train", "step", "eval", "save", "resume", "sample"]


def test_a_resume_includes_optimizer_state_that_a_new_run_allocates_late(run_plan: Any) -> None:
    early, late = (run_plan(*SMALL, "--gpu=4070", f"--states={when}", "--json").json["phases"]
                   for when in ("early", "late"))
    assert late["load"]["allocated_bytes"] < early["load"]["allocated_bytes"]
    assert late["resume"]["allocated_bytes"] == early["resume"]["allocated_bytes"]


def test_nanogpt_77m_fits_a_4070_alone_and_not_beside_2_gib(run_plan: Any) -> None:
    alone, beside = (run_plan(*NOTES_77M, "--gpu=4070", f"--others={others}") for others in ("0", "2118MiB"))
    assert (alone.code, beside.code) == (0, 1)
    assert "\nFits: needs " in alone.out
    assert "\nDoes not fit: needs " in beside.out
    room = re.search(r"everything\s+else\s+on\s+the\s+GPU\s+stays\s+under\s+([\d.]+ \w+)", alone.out)
    assert room is not None
    assert " ".join(f"stayed under {room[1]}".split()) in " ".join(beside.out.split())


@pytest.mark.parametrize("argv", [["--gpu=4070"], ["--gpu=4070", "--budget=300MiB", "--options"]])
def test_the_verdict_comes_directly_after_the_title(run_plan: Any, argv: list[str]) -> None:
    title, result, *_ = run_plan(*SMALL, *argv).out.split("\n\n")
    assert title.startswith("fitgpt on an RTX 4070: 14.52M parameters (14.45M as nanoGPT counts)")
    assert re.match("Fits: needs |Does not fit: needs ", result)


def test_a_vocabulary_that_is_not_known_is_marked_as_assumed(run_plan: Any, tmp_path: Path) -> None:
    def title(*argv: str) -> str:
        return " ".join(run_plan(*SMALL, "--gpu=4070", *argv).out.partition("\n\n")[0].split())

    assert "14.52M parameters (14.45M as nanoGPT counts) with a vocabulary of 50,304 (assumed), 2 layers" in title()
    assert "assumed" not in title("--vocab_size=50304")
    write_chars(tmp_path / "data" / "letters", train=1000)
    assert "assumed" not in title("--dataset=letters")


def test_a_table_has_one_unit_and_no_share_of_zero(run_plan: Any) -> None:
    for argv, unit in ((["--gpu=4070"], "MiB"), (["--gpu=4070", "--batch_size=256", "--trainer=nanogpt"], "GiB")):
        output = run_plan(*SMALL, *argv, "--options").out
        tables = [part for part in output.split("\n\n") if re.match("[MG]iB +|At the peak|Single changes", part)]
        assert len(tables) == 3
        assert all(re.search(rf"(?:^|\n|[\d.,]+ ){unit} +", part) for part in tables)
        assert not [line for line in tables[0].splitlines()[1:] if "iB" in line]
        assert " 0.0%" not in output


def test_a_line_says_what_attention_holds(run_plan: Any) -> None:
    flash = " ".join(run_plan(*SMALL, "--gpu=4070").out.split())
    assert "attention flash attention: keeps no score matrix (8 × 4 × 256 × 256 would take 4.0 MiB per layer)" in flash
    efficient = " ".join(run_plan(*SMALL, "--gpu=4070", "--dtype=fp32").out.split())
    assert "memory-efficient attention: keeps no score matrix (8 × 4 × 256 × 256 would take 8.0 MiB" in efficient


def test_the_config_of_the_notes_is_planned_as_pasted(run_plan: Any, tmp_path: Path) -> None:
    """It sets no max_iters, so that nanoGPT's 600,000 steps apply: more than two months on a 4070."""
    (tmp_path / "train_fineweb.py").write_text(NOTES_CONFIG)
    answer = run_plan("train_fineweb.py", "--gpu=4070")
    assert answer.code == 0
    result, warning = (" ".join(part.split()) for part in answer.out.split("\n\n")[1:3])
    assert result.startswith("Fits: ")
    said = re.match(r"This run takes (\d+) d .* to .*: max_iters is 600,000 \(nanoGPT's default\)\. 20 tokens per "
                    r"parameter are 1\.55B tokens and take .*: (--max_iters=\d+) (--lr_decay_iters=\d+) "
                    r"(--warmup_iters=\d+)$", warning)
    assert said is not None
    assert int(said[1]) > 60
    shorter = run_plan("train_fineweb.py", "--gpu=4070", *said.groups()[1:])
    assert int(said[4].partition("=")[2]) * 10 < int(said[2].partition("=")[2])
    assert "This run takes" not in shorter.out
    assert "20 per parameter" in " ".join(shorter.out.split())
    for steps, is_named in ((600_000, True), (599_999, False)):  # on a fast GPU days, if nobody chose them
        days = run_plan("train_fineweb.py", "--gpu=h200", f"--max_iters={steps}", f"--lr_decay_iters={steps}")
        assert ("This run takes" in days.out) == is_named
    assert run_plan("train_fineweb.py", "--gpu=4070", command="fit").code == 0


def test_a_note_suggests_the_vocabulary_of_a_character_dataset_that_is_missing(run_plan: Any) -> None:
    assert "--vocab_size=65" in run_plan("--dataset=shakespeare_char", "--gpu=4070").out
    assert "--vocab_size=65" not in run_plan("--dataset=openwebtext", "--gpu=4070").out


def test_json_has_every_key_and_its_figures_agree(run_plan: Any) -> None:
    for trainer in ("fitgpt", "nanogpt"):
        document = run_plan(*SMALL, f"--trainer={trainer}", "--gpu=4070", "--others=1GiB", "--json").json
        assert [key for key in KEYS if key not in document] == []
        assert list(document["phases"]) == PHASES
        held = {phase: each for phase, each in document["phases"].items() if each}
        assert all(set(each) == {"allocated_bytes", "reserved_bytes"} for each in held.values())
        assert {"load", "first_eval", "first_train", "train", "step", "eval"} <= set(held)
        most = max(each["allocated_bytes"] for each in held.values())
        assert sum(document["owners"].values()) == document["peak"]["allocated_bytes"] == most
        assert held[document["peak"]["phase"]]["allocated_bytes"] == most
        assert held["train"]["allocated_bytes"] >= held["step"]["allocated_bytes"]
        reserved = max(each["reserved_bytes"] for each in held.values())
        assert document["peak"]["reserved_bytes"] == document["reserved_bytes"]["likely"] == reserved
        for estimate in (document["reserved_bytes"], document["step_seconds"]):
            assert 0 < estimate["low"] <= estimate["likely"] <= estimate["high"]
        assert document["process_bytes"] == reserved + document["outside_bytes"]
        assert document["gpu_bytes"] == document["process_bytes"] + GiB
        assert document["budget_bytes"] == document["usable_bytes"] - GiB
        assert document["reserve_limit_bytes"] == document["budget_bytes"] - document["outside_bytes"]
        assert document["headroom_bytes"] == document["reserve_limit_bytes"] - document["needs_bytes"]
        assert (document["verdict"], document["fits"], document["tight"], document["not_seen"]) == (
            "fits", True, [], [])
        assert set(document["assumes"]) == {"torch", "attention", "compile", "allocator"}
        assert (document["schema"], document["gpu"], document["trainer"]) == (2, "RTX 4070", trainer)
        config = RunConfig(n_layer=2, n_head=4, n_embd=256, block_size=256)
        assert document["params"] == config.gpt_config().count_params()


def test_a_budget_includes_the_cuda_context(run_plan: Any) -> None:
    document = run_plan(*SMALL, "--gpu=4070", "--budget=2GiB", "--json").json
    assert document["budget_bytes"] == 2 * GiB
    assert document["reserve_limit_bytes"] == 2 * GiB - document["outside_bytes"]
    exact = document["needs_bytes"] + document["outside_bytes"]
    assert run_plan(*SMALL, "--gpu=4070", f"--budget={exact}").code == 10  # one was forecast 0.5 % too low
    assert run_plan(*SMALL, "--gpu=4070", f"--budget={exact - 1}").code == 1


def test_the_smaller_of_budget_and_leave_applies(run_plan: Any) -> None:
    for leave, budget in (("1GiB", 4 * GiB), ("9GiB", 11930 * MiB - 9 * GiB)):
        document = run_plan(*SMALL, "--gpu=4070", "--budget=4GiB", f"--leave={leave}", "--json").json
        assert document["budget_bytes"] == budget


def test_a_budget_below_the_cuda_context_gives_negative_headroom(run_plan: Any) -> None:
    argv = [*SMALL, "--gpu=h200", "--budget=500MiB"]
    document = run_plan(*argv, "--json").json
    assert document["reserve_limit_bytes"] == document["budget_bytes"] - document["outside_bytes"] < 0
    assert document["headroom_bytes"] == document["reserve_limit_bytes"] - document["needs_bytes"]
    answer = run_plan(*argv)
    assert answer.code == 1
    assert "nothing available (a budget of 500.0 MiB" in " ".join(answer.out.split())


def test_reserved_memory_never_falls_from_one_phase_to_the_next(run_plan: Any) -> None:
    """With recorded work the tape trains once more after its evaluation, which may map a little more."""
    plan = run_plan("--n_head=5", "--n_embd=480", "--n_layer=6", "--batch_size=16", "--block_size=100",
                    "--vocab_size=1", "--residual=bfloat16", "--optimizer=muon", "--bias", "--eval_batch_size=3",
                    "--gpu=4070", "--json").json
    reserved = [plan["phases"][phase]["reserved_bytes"] for phase in PHASES[:7]]
    assert reserved == sorted(reserved)


def test_suggested_changes_make_it_fit(run_plan: Any) -> None:
    roomy = run_plan(*SMALL, "--n_layer=6", "--gpu=4070", "--json").json
    budget = roomy["needs_bytes"] + roomy["outside_bytes"] - 20 * MiB
    tight = [*SMALL, "--n_layer=6", "--gpu=4070", f"--budget={budget}"]
    answer = run_plan(*tight, "--json")
    changes = answer.json["changes"]
    assert answer.code == 1
    assert len(changes) == 3
    for change in changes:
        assert list(change) == CHANGE_KEYS
        flags = [f"--{name}={value}" for name, value in change["flags"].items()]
        changed = run_plan(*tight, *flags, "--json")
        assert (changed.code, changed.json["verdict"]) == ({"fits": 0, "tight": 10}[change["verdict"]],
                                                           change["verdict"])
        assert (change["needs_bytes"], change["headroom_bytes"]) == (
            changed.json["needs_bytes"], changed.json["headroom_bytes"])
        assert flags[0] in run_plan(*tight).out


def test_a_sentence_says_that_no_single_change_is_enough(run_plan: Any) -> None:
    answer = run_plan(*SMALL, "--gpu=4070", "--budget=300MiB")
    assert answer.code == 1
    assert "No single change makes it fit. What each would save: --options." in answer.out
    assert "No single change makes it fit. Several together:" in run_plan(*SMALL, "--gpu=4070", "--budget=300MiB",
                                                                          "--options").out


def test_savings_in_training_include_the_optimizer_step(run_plan: Any) -> None:
    document = run_plan(*SMALL, "--gpu=4070", "--json").json
    small = dict(n_layer=2, n_head=4, n_embd=256, batch_size=8, block_size=256, max_iters=100)
    options = fitgpt.plan(small, gpu="4070", options=True).options
    assert options is not None
    muon = next(each for each in options if each.change.flags == ("--optimizer=muon",))
    after = run_plan(*SMALL, "--gpu=4070", "--optimizer=muon", "--json").json["phases"]
    assert muon.saved["train"] == document["phases"]["train"]["allocated_bytes"] - after["train"]["allocated_bytes"]


def test_the_fit_command_for_a_nanogpt_run_omits_the_trainer(run_plan: Any) -> None:
    far = [str(CONFIG / "gpt2_1558m.py"), "--n_layer=4", "--gpu=4070"]
    for trainer, advice in (("nanogpt", "with the same arguments but without --trainer."),
                            ("fitgpt", "with the same arguments.")):
        output = " ".join(run_plan(*far, f"--trainer={trainer}", "--budget=1GiB").out.split())
        assert f"fitgpt fit, {advice}" in output


def first_flag(change: dict[str, Any]) -> str:
    name, value = next(iter(change["flags"].items()))
    return f"--{name}={value}"


def test_options_price_every_change_exactly(run_plan: Any) -> None:
    document = run_plan(*SMALL, "--gpu=4070", "--options", "--json").json
    flags = {first_flag(each): each for each in document["options"]}
    assert {"--batch_size=4", "--saved_activations=input", "--offload=optimizer", "--weights=bfloat16"} <= set(flags)
    changed = run_plan(*SMALL, "--gpu=4070", "--saved_activations=input", "--json").json
    assert flags["--saved_activations=input"]["needs_bytes"] == changed["needs_bytes"]
    assert all(list(each) == CHANGE_KEYS for each in document["options"])
    assert {flag: flags[flag]["same_training"] for flag in ("--saved_activations=input", "--weights=bfloat16")} == {
        "--saved_activations=input": True, "--weights=bfloat16": False}
    shown = run_plan(*SMALL, "--gpu=4070", "--options").out
    assert all(flag in shown for flag in flags)
    for each in document["options"]:  # "--batch_size=4 …" with what has to be typed with it
        together = " ".join(f"--{name}={value}" for name, value in each["flags"].items())
        assert together in " ".join(shown.split())
        assert (f"{first_flag(each)} …  " in shown) == (" " in together)
    policies = ("no_mlp_up", "attention_proj", "attention", "input")
    speeds = [document["step_seconds"]["likely"] / flags[f"--saved_activations={policy}"]["step_seconds"]["likely"]
              for policy in policies]
    assert 1 > speeds[0] > speeds[1] > speeds[2] > speeds[3] > 0.5
    assert f"{speeds[3]:.2f}  exact  ✓" in shown


def test_options_of_nanogpt_have_relative_speeds(run_plan: Any) -> None:
    document = run_plan(*SMALL, "--gpu=4070", "--trainer=nanogpt", "--options", "--json").json
    seconds = {first_flag(each): each["step_seconds"]["likely"] for each in document["options"]}
    now = document["step_seconds"]["likely"]
    assert seconds["--batch_size=1"] > seconds["--batch_size=4"] > now > seconds["--trainer=fitgpt"]


def test_every_line_is_at_most_eighty_columns_wide(run_plan: Any) -> None:
    for argv in ([*SMALL, "--trainer=nanogpt", "--gpu=4070", "--budget=700MiB", "--options"],
                 [*SMALL, "--gpu=RTX PRO 6000 Blackwell", "--options"], [*SMALL, "--all-cards"]):
        lines = run_plan(*argv).out.splitlines()
        assert [line for line in lines if len(line) > 80] == []
        assert len(lines) > 20
    assert "\x1b" not in "".join(lines)


def test_fits_is_coloured_only_on_a_terminal(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(plan, "can_redraw", lambda: True)
    assert "\x1b[1;32mFits\x1b[0m: " in run_plan(*SMALL, "--gpu=4070").out
    assert "\x1b[1;31mDoes not fit\x1b[0m: " in run_plan(*SMALL, "--gpu=4070", "--budget=300MiB").out


def test_the_nearest_recorded_run_is_shown(run_plan: Any) -> None:
    argv = [*NOTES_77M, "--gpu=4070"]
    nearest = run_plan(*argv, "--json").json["nearest_recorded_run"]
    assert (nearest["n_layer"], nearest["n_embd"], nearest["batch_size"], nearest["mode"]) == (12, 576, 16, "compiled")
    assert "measured 9.89 GiB allocated, 10.65 GiB reserved; forecast" in " ".join(run_plan(*argv).out.split())
    assert run_plan(*argv, "--compile=False", "--json").json["nearest_recorded_run"]["mode"] == "eager"


def test_nanogpt_with_expandable_segments_has_its_own_track_record(
        run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    document = run_plan(*SMALL, "--gpu=h200", "--trainer=nanogpt", "--json").json
    assert document["assumes"]["allocator"] == "expandable segments"
    assert document["track_record"]["recorded_runs_in_all"] == 1


def test_timeline_writes_a_page_with_one_step(run_plan: Any, tmp_path: Path) -> None:
    answer = run_plan(*SMALL, "--gpu=4070", "--timeline=step.html", "--json")
    page = (tmp_path / "step.html").read_text()
    assert answer.json["schema"] == 2  # the sentence about the page goes elsewhere
    assert "step.html" in answer.err
    assert "<svg" in page
    assert "peak " in page
    assert "×" in page  # the formulas


def test_only_a_page_that_plan_wrote_is_replaced(run_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<!doctype html>\n<p>by hand</p>")
    answer = run_plan(*SMALL, "--gpu=4070", "--timeline=mine.html")
    assert (answer.code, answer.out) == (2, "")
    assert "--timeline mine_plan.html" in answer.err
    assert "by hand" in (tmp_path / "mine.html").read_text()
    assert "replaced" not in run_plan(*SMALL, "--gpu=4070", "--timeline=step.html").out
    again = run_plan(*SMALL, "--gpu=4070", "--timeline=step.html")
    assert again.code == 0
    assert "step.html (it replaced the one that was there)" in again.out
