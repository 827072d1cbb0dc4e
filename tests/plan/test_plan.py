"""`fitgpt plan`, `fitgpt cards` and `fitgpt.plan`: the verdict, its figures, its words, and all that is refused."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asking import CONFIG, NOTES_77M, ROOT, SMALL, write_chars

import fitgpt
from fitgpt import planner
from fitgpt.config import RunConfig
from fitgpt.data.header import check_vocab
from fitgpt.errors import DataError, UsageError
from fitgpt.memory.accuracy import basis
from fitgpt.memory.basis import FILE as BASIS
from fitgpt.runfolder import open_run
from fitgpt.units import GiB, MiB, show_bytes

KEYS = ["schema", "trainer", "card", "torch", "params", "usable_bytes", "others_bytes", "budget_bytes", "outside_bytes",
        "reserve_limit_bytes", "needs_bytes", "headroom_bytes", "fits", "process_bytes", "card_bytes", "phases",
        "owners_at_peak", "reserved_range_bytes", "assumes", "basis"]
PHASES = ["load", "first_eval", "first_train", "train", "step", "eval", "save", "resume", "sample"]


# ---- the verdict


def test_a_resume_holds_the_states_that_a_new_run_makes_late(ask: Any) -> None:
    early, late = (ask(*SMALL, "--gpu=4070", f"--states={when}", "--json").json["phases"] for when in ("early", "late"))
    assert late["load"]["allocated_bytes"] < early["load"]["allocated_bytes"]
    assert late["resume"]["allocated_bytes"] == early["resume"]["allocated_bytes"]


def test_nanogpts_77m_fits_a_4070_alone_and_not_beside_two_gigabytes(ask: Any) -> None:
    alone, beside = (ask(*NOTES_77M, "--gpu=4070", f"--others={others}") for others in ("0", "2118MiB"))
    assert (alone.code, beside.code) == (0, 1)
    assert "\nFits: needs " in alone.out
    assert "\nDoes not fit: needs " in beside.out
    room = re.search(r"everything\s+else\s+on\s+the\s+card\s+stays\s+under\s+([\d.]+ \w+)", alone.out)
    assert room is not None
    assert " ".join(f"stayed under {room[1]}".split()) in " ".join(beside.out.split())


def test_characters_are_said_to_be_fewer_where_their_number_is_not_known(ask: Any) -> None:
    assert "--vocab_size=65" in ask("--dataset=shakespeare_char", "--gpu=4070").out
    assert "--vocab_size=65" not in ask("--dataset=openwebtext", "--gpu=4070").out


def test_json_has_every_key_and_its_figures_agree(ask: Any) -> None:
    for trainer in ("fitgpt", "nanogpt"):
        told = ask(*SMALL, f"--trainer={trainer}", "--gpu=4070", "--others=1GiB", "--json").json
        assert [key for key in KEYS if key not in told] == []
        assert list(told["phases"]) == PHASES
        held = {phase: each for phase, each in told["phases"].items() if each}
        assert all(set(each) == {"allocated_bytes", "reserved_bytes"} for each in held.values())
        assert {"load", "first_eval", "first_train", "train", "step", "eval"} <= set(held)
        assert sum(told["owners_at_peak"].values()) == max(each["allocated_bytes"] for each in held.values())
        assert held["train"]["allocated_bytes"] >= held["step"]["allocated_bytes"]
        reserved = max(each["reserved_bytes"] for each in held.values())
        assert told["process_bytes"] == reserved + told["outside_bytes"]
        assert told["card_bytes"] == told["process_bytes"] + GiB
        assert told["budget_bytes"] == told["usable_bytes"] - GiB
        assert told["reserve_limit_bytes"] == told["budget_bytes"] - told["outside_bytes"]
        assert told["headroom_bytes"] == told["reserve_limit_bytes"] - told["needs_bytes"]
        assert told["fits"] is (told["headroom_bytes"] >= 0)
        assert set(told["assumes"]) == {"torch", "attention", "compile", "allocator"}
        assert (told["schema"], told["card"], told["trainer"]) == (1, "RTX 4070", trainer)
        assert told["params"] == RunConfig(n_layer=2, n_head=4, n_embd=256, block_size=256).gpt_config().count_params()


def test_a_budget_is_what_the_process_may_hold_its_context_included(ask: Any) -> None:
    told = ask(*SMALL, "--gpu=4070", "--budget=2GiB", "--json").json
    assert told["budget_bytes"] == 2 * GiB
    assert told["reserve_limit_bytes"] == 2 * GiB - told["outside_bytes"]
    exact = told["needs_bytes"] + told["outside_bytes"]
    assert ask(*SMALL, "--gpu=4070", f"--budget={exact}").code == 0
    assert ask(*SMALL, "--gpu=4070", f"--budget={exact - 1}").code == 1


def test_of_a_budget_and_what_is_to_be_left_free_the_smaller_holds(ask: Any) -> None:
    for leave, budget in (("1GiB", 4 * GiB), ("9GiB", 11930 * MiB - 9 * GiB)):
        told = ask(*SMALL, "--gpu=4070", "--budget=4GiB", f"--leave={leave}", "--json").json
        assert told["budget_bytes"] == budget


def test_a_budget_below_what_is_outside_the_allocator_is_short_by_both(ask: Any) -> None:
    argv = [*SMALL, "--gpu=h200", "--budget=500MiB"]
    told = ask(*argv, "--json").json
    assert told["reserve_limit_bytes"] == told["budget_bytes"] - told["outside_bytes"] < 0
    assert told["headroom_bytes"] == told["reserve_limit_bytes"] - told["needs_bytes"]
    answer = ask(*argv)
    assert answer.code == 1
    assert "may reserve nothing (a budget of 500.0 MiB" in " ".join(answer.out.split())


def test_what_is_reserved_never_falls_from_one_phase_of_a_run_to_the_next(ask: Any) -> None:
    """With recorded work the tape trains once more after its evaluation, which may map a little more."""
    told = ask("--n_head=5", "--n_embd=480", "--n_layer=6", "--batch_size=16", "--block_size=100", "--vocab_size=1",
               "--residual=bfloat16", "--optimizer=muon", "--bias", "--eval_batch_size=3", "--gpu=4070", "--json").json
    reserved = [told["phases"][phase]["reserved_bytes"] for phase in PHASES[:7]]
    assert reserved == sorted(reserved)


def test_what_would_make_it_fit_does(ask: Any) -> None:
    roomy = ask(*SMALL, "--n_layer=6", "--gpu=4070", "--json").json
    budget = roomy["needs_bytes"] + roomy["outside_bytes"] - 20 * MiB
    tight = [*SMALL, "--n_layer=6", "--gpu=4070", f"--budget={budget}"]
    answer = ask(*tight, "--json")
    changes = answer.json["changes"]
    assert answer.code == 1
    assert len(changes) == 3
    for change in changes:
        assert ask(*tight, *change["flags"]).code == 0
        assert change["flags"][0] in ask(*tight).out


def test_where_no_single_change_is_enough_it_says_so(ask: Any) -> None:
    answer = ask(*SMALL, "--gpu=4070", "--budget=300MiB")
    assert answer.code == 1
    assert "No single change makes it fit." in answer.out


def test_options_price_every_change_and_the_price_is_true(ask: Any) -> None:
    told = ask(*SMALL, "--gpu=4070", "--options", "--json").json
    flags = {each["change"]["flags"][0]: each for each in told["options"]}
    assert {"--batch_size=4", "--recompute=input", "--offload=optimizer", "--weights=bfloat16"} <= set(flags)
    changed = ask(*SMALL, "--gpu=4070", "--recompute=input", "--json").json
    assert flags["--recompute=input"]["needs"] == changed["needs_bytes"]
    shown = ask(*SMALL, "--gpu=4070", "--options").out
    assert all(flag in shown for flag in flags)
    levels = ("no_wide", "attention_projection", "attention", "input")
    speeds = [flags[f"--recompute={level}"]["speed"] for level in levels]
    assert 1 > speeds[0] > speeds[1] > speeds[2] > speeds[3] > 0.5
    assert f"{speeds[3]:.2f}  exact  ✓" in shown


def test_options_of_nanogpt_are_priced_in_speed_too(ask: Any) -> None:
    told = ask(*SMALL, "--gpu=4070", "--trainer=nanogpt", "--options", "--json").json["options"]
    speeds = {each["change"]["flags"][0]: each["speed"] for each in told}
    assert speeds["--batch_size=1"] < speeds["--batch_size=4"] < 1 < speeds["--trainer=fitgpt"]


def test_every_line_is_at_most_eighty_columns_wide(ask: Any) -> None:
    for argv in ([*SMALL, "--trainer=nanogpt", "--gpu=4070", "--budget=700MiB", "--options"],
                 [*SMALL, "--gpu=RTX PRO 6000 Blackwell", "--options"], [*SMALL, "--all-cards"]):
        lines = ask(*argv).out.splitlines()
        assert [line for line in lines if len(line) > 80] == []
        assert len(lines) > 20
    assert "\x1b" not in "".join(lines)


def test_fits_is_coloured_only_on_a_terminal(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_colours", lambda: True)
    assert "\x1b[1;32mFits\x1b[0m: " in ask(*SMALL, "--gpu=4070").out
    assert "\x1b[1;31mDoes not fit\x1b[0m: " in ask(*SMALL, "--gpu=4070", "--budget=300MiB").out


# ---- the run


def test_the_run_is_told_in_tokens_and_epochs(ask: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=81_920)
    told = ask(*SMALL, "--gpu=4070", "--dataset=letters", "--gradient_accumulation_steps=2", "--json").json["run"]
    assert (told["tokens_per_step"], told["steps"], told["tokens"]) == (2 * 8 * 256, 100, 409_600)
    assert told["epochs"] == 5
    assert told["tokens_per_param"] == told["tokens"] / told["params"]
    assert told["checkpoint_bytes"] > 12 * told["params"]


def test_tokens_and_epochs_become_steps(ask: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=81_921)
    argv = [*SMALL[:-1], "--gpu=4070", "--dataset=letters", "--gradient_accumulation_steps=1"]
    for million in ("1M", "1e6", "1_000_000"):
        counted = ask(*argv, f"--tokens={million}")
        assert "are 489 steps: max_iters=489 lr_decay_iters=489." in " ".join(counted.out.split())
    assert ask(*argv, "--epochs=2", "--json").json["run"]["steps"] == 81  # 80 whole steps and a token


def test_a_run_for_some_hours_is_done_in_them(ask: Any) -> None:
    for trainer in ("fitgpt", "nanogpt"):
        argv = [*SMALL[:-1], "--gpu=4070", f"--trainer={trainer}", "--json"]
        for hours in (0.01, 8, 7.3):
            run = ask(*argv, f"--hours={hours}").json["run"]
            assert run["hours"][1] <= hours < run["hours"][1] * (run["steps"] + 1) / run["steps"]
        assert ask(*argv, "--hours=1e-9").json["run"]["steps"] == 1


def test_a_plan_of_nanogpt_says_how_long_it_takes(ask: Any) -> None:
    low, high = ask(*SMALL, "--gpu=4070", "--trainer=nanogpt", "--json").json["run"]["hours"]
    assert 0 < low < high
    longer = ask(*SMALL[:-1], "--gpu=4070", "--trainer=nanogpt", "--hours=8").out
    assert re.search(r"on disk, \d+ h \d+ min to 7 h 59 min|on disk, \d+ h \d+ min to 8 h", " ".join(longer.split()))


def test_one_step_is_a_step(ask: Any) -> None:
    words = " ".join(ask(*SMALL[:-1], "--gpu=4070", "--tokens=1").out.split())
    assert "× 1 step = " in words
    assert "are 1 step: max_iters=1 " in words
    assert "× 100 steps = " in ask(*SMALL, "--gpu=4070").out


def test_the_vocabulary_is_the_datas_if_there_is_any(ask: Any, tmp_path: Path) -> None:
    def params(*argv: str) -> int:
        return int(ask(*SMALL, "--gpu=4070", "--json", *argv).json["params"])

    write_chars(tmp_path / "data" / "letters", train=1000)
    shape = dict(n_layer=2, n_head=4, n_embd=256, block_size=256)
    for vocab, argv in ((65, ["--dataset=letters"]), (50304, ["--dataset=nowhere"]),
                        (777, ["--dataset=letters", "--vocab_size=777"])):
        assert params(*argv) == RunConfig(**shape, vocab_size=vocab).gpt_config().count_params()  # type: ignore[arg-type]
    assert "There is no dataset 'nowhere' here." in ask(*SMALL, "--gpu=4070", "--dataset=nowhere").out


def test_damaged_data_is_said_and_planned_without(ask: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "torn"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"abc")
    (folder / "val.bin").write_bytes(b"abcd")
    answer = ask(*SMALL, "--gpu=4070", "--dataset=torn")
    assert answer.code == 0
    assert "an odd number" in " ".join(answer.out.split())


def test_weights_to_start_from_give_their_shape(ask: Any, tmp_path: Path) -> None:
    assert ask("--init_from=gpt2", "--gpu=4090", "--json").json["params"] == 124_439_808
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 64, "vocab_size": 300}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 96, **shape}))
    for block, flags in ((96, ()), (96, ("--block_size=512",)), (64, ("--block_size=64",))):
        told = ask("--init_from=mine", "--gpu=4070", "--json", *flags).json
        expected = RunConfig(**shape, block_size=block, bias=True)  # type: ignore[arg-type]
        assert told["params"] == expected.gpt_config().count_params()
        assert told["needs_bytes"] == fitgpt.plan(expected, "4070").forecast.needs


def test_a_run_to_start_from_gives_its_shape(ask: Any, tmp_path: Path) -> None:
    first = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=96, vocab_size=65, bias=True, out_dir="runs/a")
    with open_run("runs/a", first.to_dict(), resume=False) as folder:
        folder.record(first.to_dict())
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    for named in ("runs/a", "runs/a/checkpoints/step-00000010"):
        told = ask(f"--init_from={named}", "--n_layer=12", "--gpu=4070", "--json").json
        assert told["params"] == first.gpt_config().count_params()
        assert any("n_layer=2, n_head=2, n_embd=64, block_size=96" in note for note in told["notes"])


def test_a_folder_without_weights_is_no_start(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama", "n_layer": 3}')
    for name, words in (("empty", "holds no weights to start from"), ("llama", "does not describe a GPT-2")):
        answer = ask(f"--init_from={name}", "--gpu=4070")
        assert (answer.code, answer.out) == (3, "")
        assert words in answer.err


def test_the_shape_in_nanogpts_checkpoint_is_said_to_be_unknown(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "ckpt.pt").write_bytes(b"")
    told = ask(*SMALL, "--init_from=theirs", "--gpu=4070", "--json").json
    assert any("only `train` can read" in note for note in told["notes"])


def test_a_run_to_resume_is_planned_as_it_was_recorded(ask: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=1000)
    config = RunConfig(n_layer=2, n_head=2, n_embd=64, dataset="letters", out_dir="runs/a", vocab_size=65)
    with open_run("runs/a", config.to_dict(), resume=False) as folder:
        folder.record(config.to_dict())
    (tmp_path / "runs" / "a" / "checkpoints" / "step-00000010").mkdir(parents=True)
    told = ask("--resume", "--out_dir=runs/a", "--gpu=4070", "--json").json
    assert told["params"] == config.gpt_config().count_params()


def test_where_sampling_holds_most_the_owners_are_those_of_sampling(ask: Any) -> None:
    """It takes float32 weights onto the card, which a run with rounded weights and all else on the host does not."""
    told = ask(*SMALL, "--vocab_size=65", "--n_layer=8", "--block_size=16", "--batch_size=1", "--weights=bfloat16",
               "--offload=gradients", "--recompute=input", "--gpu=4070", "--json").json
    assert told["peak_phase"] == "sample"
    assert sum(told["owners_at_peak"].values()) == told["phases"]["sample"]["allocated_bytes"]
    assert told["formulas"]["weights"].endswith(" × 4 bytes")
    assert told["formulas"]["activations"].startswith("7 layers × 16 tokens × 256 × 4 bytes")


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_a_run_that_only_evaluates_holds_no_optimizer_and_no_gradients(ask: Any, trainer: str) -> None:
    flags = [*SMALL, f"--trainer={trainer}", "--gpu=4070", "--eval_only"]
    told = ask(*flags, "--json").json
    assert [phase for phase, held in told["phases"].items() if held] == ["load", "first_eval"]
    assert not {"optimizer", "gradients"} & set(told["owners_at_peak"])
    assert told["run"]["steps"] == 0
    assert "evaluates once, and trains nothing" in ask(*flags).out
    tight = ask(*flags, f"--budget={told['needs_bytes'] + told['outside_bytes'] - MiB}", "--options", "--json")
    assert tight.code == 1
    assert tight.json["changes"]


def test_a_plan_that_fit_wrote_is_what_is_planned(ask: Any, tmp_path: Path) -> None:
    knobs = RunConfig(n_layer=2, n_head=4, n_embd=256, batch_size=2, block_size=128).to_dict()
    (tmp_path / "my.plan.json").write_text(json.dumps({"schema": 1, "config": knobs}))
    told, asked = (ask(*flags, "--gpu=4070", "--json").json for flags in (
        ["--plan=my.plan.json"], ["--n_layer=2", "--n_head=4", "--n_embd=256", "--batch_size=2", "--block_size=128"]))
    assert told["needs_bytes"] == asked["needs_bytes"]
    assert ask("--plan=nowhere.json", "--gpu=4070").code == 2
    assert "`fitgpt fit` with the same words" in " ".join(ask(*SMALL, "--gpu=4070", "--fit").out.split())


def test_the_allocator_is_the_one_that_the_environment_asks_for(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {}
    for said in ("", "expandable_segments:True", "expandable_segments:False", "max_split_size_mb:128"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
        kinds[said] = [ask(*SMALL, "--gpu=4070", f"--trainer={trainer}", "--json").json["assumes"]["allocator"]
                       for trainer in ("fitgpt", "nanogpt")]
    expandable, native = "expandable segments", "native"
    assert list(kinds.values()) == [[expandable, native], [expandable] * 2, [native] * 2, [native] * 2]


@pytest.mark.parametrize(("version", "words"), [
    ("2.11", "2.11"), ("2.11.0+cu130", "2.11"), ("2.13.0", "2.13 (recorded runs are of 2.11)"),
    ("2.14.0a0+git12ab", "2.14 (not measured: recorded runs are of 2.11)"),
    ("9.9", "9.9 (not measured: recorded runs are of 2.11)")])
def test_a_version_of_torch_is_said_as_torch_says_it_and_one_that_is_not_measured_is_said_to_be(
        ask: Any, version: str, words: str) -> None:
    assert ask(*SMALL, "--gpu=4070", f"--torch={version}", "--json").json["assumes"]["torch"] == words


def test_nanogpt_does_not_know_what_we_added(ask: Any) -> None:
    words = " ".join(ask(*SMALL, "--trainer=nanogpt", "--gpu=4070", "--eval_batch_size=2").out.split())
    assert "nanoGPT's train.py does not know eval_batch_size=2" in words


# ---- what is refused


@pytest.mark.parametrize(("argv", "words"), [
    (["--gpu=nonsense"], "'nonsense' is not a card"),
    (["--gpu=4070", "--budget=0"], "must be above 0"),
    (["--gpu=4070", "--budget=-3GiB"], "takes a size"),
    (["--gpu=4070", "--budget=lots"], "takes a size"),
    (["--gpu=4070", "--budget=nan"], "takes a size"),
    (["--gpu=4070", "--budget=40GiB"], "is more than the 11.65 GiB"),
    (["--gpu=4070", "--others=12GiB"], "leaves nothing"),
    (["--gpu=4070", "--others=-1"], "takes a size"),
    (["--gpu=4070", "--others=6GiB", "--budget=8GiB"], "together more than"),
    (["--gpu=4070", "--tokens=1B", "--epochs=1"], "--tokens and --epochs"),
    (["--gpu=4070", "--tokens=1B", "--max_iters=5"], "--max_iters=5"),
    (["--gpu=4070", "--tokens=0"], "must be above 0"),
    (["--gpu=4070", "--tokens=some"], "takes a count"),
    (["--gpu=4070", "--tokens=900000T"], "at most 2,147,483,647"),
    (["--gpu=4070", "--epochs=1"], "There is no dataset"),
    (["--gpu=4070", "--epochs=-1"], "must be at least 0"),
    (["--gpu=4070", "--epochs=inf"], "finite"),
    (["--gpu=t4", "--trainer=nanogpt", "--dtype=bfloat16", "--hours=8"], "no estimate of the speed"),
    (["--gpu=4070", "--trainer=karpathy"], "one of fitgpt, nanogpt"),
    (["--gpu=4070", "--torch=new"], "a version such as 2.11"),
    (["--gpu=4070", "--dropout=0.1", "--cuda_graphs=True"], "cuda_graphs=True does not work with dropout=0.1"),
    (["--gpu=4070", "--all-cards"], "--all-cards"),
    (["--gpu=4070", "--n_embd=513"], "not a multiple"),
    (["--gpu=4070", "--batchsize=3"], "--batchsize is not a knob"),
    (["--gpu=t4", "--dtype=bfloat16"], "compute capability 8.0"),
    (["--gpu=4070", "nowhere.py"], "There is no config file"),
    (["--gpu=4070", "odd.py"], "batch_sise"),
    (["--device=cpu"], "device=cpu"),
])
def test_a_mistake_is_answered_with_a_sentence_and_a_fix(ask: Any, tmp_path: Path, argv: list[str],
                                                        words: str) -> None:
    (tmp_path / "odd.py").write_text("batch_sise = 8\n")
    (tmp_path / "empty").mkdir()
    answer = ask(*argv)
    assert (answer.code, answer.out) == (2, "")
    assert words in answer.err
    what, *fix = answer.err.splitlines()
    assert what.startswith("fitgpt: ")
    assert fix


def test_a_vocabulary_that_is_not_the_datas_is_refused_in_trains_own_words(ask: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=1000)
    with pytest.raises(DataError) as of_train:
        check_vocab(None, 50, 65)
    wrong = [*SMALL, "--dataset=letters", "--vocab_size=50"]
    for verb in ("plan", "fit"):
        answer = ask(*wrong, "--gpu=4070", verb=verb)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == f"fitgpt: {of_train.value.what}\n  {of_train.value.fix}\n"
    with pytest.raises(UsageError, match="do not agree"):
        fitgpt.plan({"dataset": "letters", "vocab_size": 50}, gpu="4070")
    assert ask(*SMALL, "--dataset=letters", "--init_from=gpt2", "--gpu=4070").code == 2
    assert ask(*wrong, "--trainer=nanogpt", "--gpu=4070").code == 0  # which does not look


def test_what_only_train_can_read_is_not_refused_for_its_vocabulary(ask: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=1000)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "ckpt.pt").write_bytes(b"")
    assert ask(*SMALL, "--dataset=letters", "--vocab_size=50", "--init_from=theirs", "--gpu=4070").code == 0


def test_a_page_that_cannot_be_written_is_said_before_the_plan(ask: Any) -> None:
    answer = ask(*SMALL, "--gpu=4070", "--timeline=no/such/folder/x.html")
    assert (answer.code, answer.out) == (2, "")
    assert "--timeline no/such/folder/x.html: there is no folder no/such/folder." in answer.err


# ---- the page


def test_a_step_is_drawn_on_a_page_of_its_own(ask: Any, tmp_path: Path) -> None:
    answer = ask(*SMALL, "--gpu=4070", "--timeline=step.html", "--json")
    page = (tmp_path / "step.html").read_text()
    assert answer.json["schema"] == 1  # the sentence about the page goes elsewhere
    assert "step.html" in answer.err
    assert "<svg" in page
    assert "peak " in page
    assert "×" in page  # the formulas


def test_only_a_page_of_its_own_is_drawn_over(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("<!doctype html>\n<p>by hand</p>")
    answer = ask(*SMALL, "--gpu=4070", "--timeline=mine.html")
    assert (answer.code, answer.out) == (2, "")
    assert "--timeline mine_plan.html" in answer.err
    assert "by hand" in (tmp_path / "mine.html").read_text()
    assert "replaced" not in ask(*SMALL, "--gpu=4070", "--timeline=step.html").out
    again = ask(*SMALL, "--gpu=4070", "--timeline=step.html")
    assert again.code == 0
    assert "step.html (it replaced the one that was there)" in again.out


# ---- for other programs


def test_the_call_takes_a_file_a_dict_or_a_config(ask: Any, tmp_path: Path) -> None:
    shape: dict[str, Any] = dict(n_layer=2, n_head=4, n_embd=256, batch_size=8, block_size=256, max_iters=100)
    (tmp_path / "mine.py").write_text("".join(f"{key} = {value}\n" for key, value in shape.items()))
    needs = ask(*SMALL, "--gpu=4070", "--json").json["needs_bytes"]
    for config in ("mine.py", tmp_path / "mine.py", shape, RunConfig(**shape)):
        found = fitgpt.plan(config, gpu="4070")
        assert found.forecast.needs == needs
        assert found.fits
    assert not fitgpt.plan(shape, gpu="4070", budget="300MiB").fits
    assert not fitgpt.plan({**shape, "budget": "300MiB"}, gpu="4070").fits  # as `train` takes it
    assert fitgpt.plan({**shape, "leave": "11GiB"}, gpu="4070").budget.budget == 11930 * MiB - 11 * GiB
    assert fitgpt.plan(shape, gpu="4070", others=GiB).budget.others == GiB
    with pytest.raises(UsageError, match="batch_sise"):
        fitgpt.plan({"batch_sise": 3}, gpu="4070")


def test_the_call_takes_knobs_that_count_more_than_the_config(ask: Any, tmp_path: Path) -> None:
    shape: dict[str, Any] = dict(n_layer=2, n_head=4, n_embd=256, batch_size=64, block_size=256, max_iters=100)
    (tmp_path / "mine.py").write_text("".join(f"{key} = {value}\n" for key, value in shape.items()))
    needs = ask(*SMALL, "--gpu=4070", "--json").json["needs_bytes"]
    for config in ("mine.py", shape, RunConfig(**shape), {**shape, "gpu": "4070"}):
        assert fitgpt.plan(config, gpu="4070", batch_size=8).forecast.needs == needs
        assert fitgpt.plan(config, gpu=4070).forecast.needs > needs
    assert fitgpt.plan({**shape, "gpu": "4090", "trainer": "nanogpt"}).to_dict()["trainer"] == "nanogpt"
    assert fitgpt.plan(shape, gpu="4070", leave=11 * GiB).budget.budget == 11930 * MiB - 11 * GiB
    assert fitgpt.plan(shape, gpu="4070", tokens="1M").run.steps == ask(
        *SMALL[:-1], "--batch_size=64", "--gpu=4070", "--tokens=1M", "--json").json["run"]["steps"]


@pytest.mark.parametrize(("told", "knobs", "words"), [
    ({}, {"bach_size": 8}, "batch_size"), ({}, {"gpus": "4070"}, "gpu"), ({}, {"json": True}, "'json'"),
    ({}, {"batch_size": "many"}, "batch_size"), ({}, {"trainer": "karpathy"}, "one of fitgpt, nanogpt"),
    (None, {}, "None"), ([], {}, r"\[\]"), (3, {}, "a dict of knobs"), (b"x.py", {}, "a config file"),
    ({1: 2}, {}, "1 is not a knob"),
])
def test_what_the_call_does_not_take_is_said(ask: Any, told: Any, knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        fitgpt.plan(told, **{"gpu": "4070", **knobs})
    assert refused.value.fix
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("flags", [{}, {"budget": "700MiB", "batch_size": 64}, {"options": True}])
def test_the_call_answers_what_the_command_prints(ask: Any, flags: dict[str, Any]) -> None:
    shape = dict(each.removeprefix("--").split("=") for each in SMALL)
    found = fitgpt.plan({key: int(value) for key, value in shape.items()}, gpu="4070", **flags)
    argv = [*SMALL, "--gpu=4070", *(f"--{key}={value}" for key, value in flags.items())]
    printed = ask(*argv).out
    assert f"{found}\n" == printed
    assert html.unescape(found._repr_html_()) == f"<pre>{printed.rstrip()}</pre>"
    assert json.loads(json.dumps(found.to_dict())) == ask(*argv, "--json").json
    assert len(repr(found)) < 400
    assert f"needs {show_bytes(found.forecast.needs)}" in repr(found)


def test_neither_torch_nor_numpy_nor_rich_is_loaded(tmp_path: Path) -> None:
    script = ("import sys, fitgpt\nfitgpt.plan(sys.argv[1], gpu='4070')._repr_html_()\nfrom fitgpt.cli import main\n"
              "main(['plan', sys.argv[1], '--gpu=4070', '--options', '--timeline=x.html'])\n"
              "main(['plan', sys.argv[1], '--budget=100MiB'])\nmain(['cards'])\n"
              "assert callable(fitgpt.plan)\nassert not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script, str(CONFIG / "shakespeare_char.py")], cwd=tmp_path,
                           env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_basis_is_what_the_recorded_runs_give(ask: Any) -> None:
    records = [*sorted((ROOT / "bench" / "results").glob("nanogpt*_h200.json")),
               *(ROOT / "tests" / "golden" / f"h200{name}.json"
                 for name in ("", "_kernels", "_switches", "_notes", "_bitsandbytes")),
               ROOT / "bench" / "results" / "triples_h200.json"]
    rows = [row for record in records for row in basis(str(record), "H200", "2.11")]
    kept = json.loads(BASIS.read_text())["runs"]
    assert kept == rows
    for trainer in ("nanogpt", "fitgpt"):
        errors = [row["worst_percent"] for row in rows if row["trainer"] == trainer]
        told = ask(*SMALL, "--gpu=h200", f"--trainer={trainer}", "--json").json["basis"]
        assert told == {"recorded_runs_on_this_card": len(errors), "recorded_runs_in_all": len(errors),
                        "worst_error_percent": max(errors, key=abs)}
    worst = "the worst figure was 0.49 % below what was measured"  # of docs/accuracy.md's runs as a user has them
    assert worst in " ".join(ask(*SMALL, "--gpu=h200").out.split())


def test_of_cards_with_one_name_the_smallest_is_taken_and_the_others_are_named(ask: Any) -> None:
    notes = {name: [note for note in ask(*SMALL, f"--gpu={name}", "--json").json["notes"] if "is also said of" in note]
             for name in ("4060 ti", "4060 ti 16gb", "4070")}
    told = "'4060 ti' is also said of the RTX 4060 Ti 16GB: the smallest is taken, unless the name says which."
    assert notes == {"4060 ti": [told], "4060 ti 16gb": [], "4070": []}


def test_nanogpts_runs_with_expandable_segments_have_a_basis_of_their_own(
        ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    told = ask(*SMALL, "--gpu=h200", "--trainer=nanogpt", "--json").json
    assert (told["assumes"]["allocator"], told["basis"]["recorded_runs_in_all"]) == ("expandable segments", 1)
