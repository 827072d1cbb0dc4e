"""What the page is told is what `fitgpt plan` says; its buttons do what they promise."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from fitgpt.commands import fit as fitting
from fitgpt.commands import plan
from fitgpt.commands.main import VERBS, options_of
from fitgpt.config.command_options import PlanQuestions
from fitgpt.config.fields import walk
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DoesNotFit, UsageError
from fitgpt.core.units import GiB, MiB, parse_bytes
from fitgpt.hardware import host
from fitgpt.memory.setting import Setting
from fitgpt.nouns import MemoryReading
from fitgpt.planning import forecast
from fitgpt.planning.changes import single_changes
from fitgpt.planning.choose import fit
from fitgpt.sights import CardState, Program, RunState, Track, WatchFrame
from fitgpt.web import answers, fitted, fixes, form, live, pasted, worker
from fitgpt.web.presets import PRESETS
from fitgpt.web.settings import CARRIED, KNOBS, QUESTIONS, Asked, command, config_file, flags_in, plan_command, read
from web_server import NOTES

SMALL = dict(n_layer=1, n_head=2, n_embd=64, block_size=64, batch_size=4, vocab_size=512)
ROOT = Path(__file__).parent.parent.parent


def asked(**told: Any) -> Asked:
    return read(urlencode({"gpu": "RTX 4070"} | told))


# ---- the plan


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_the_bars_are_what_the_plan_forecasts(trainer: str) -> None:
    question = asked(trainer=trainer, **SMALL)
    told = forecast.plan(question.config, question.place.setting, question.place.budget, trainer)
    rows = {row["phase"]: row for row in answers.plan(question)["bars"]["rows"]}
    assert {"load", "first_eval", "first_train", "train", "step", "eval"} <= rows.keys()
    for phase, row in rows.items():
        held = told.forecast.phases[phase]
        assert (row["allocated"], row["reserved"]) == (held.allocated, held.reserved)
        assert sum(row["owners"].values()) == row["allocated"]
    peak = next(row for row in rows.values() if row["peak"])
    assert peak["owners"] == {share.owner: share.nbytes for share in told.forecast.owners_at_peak}


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_answer_at_once_and_the_exact_one_never_disagree(trainer: str, compiled: bool) -> None:
    question = asked(trainer=trainer, compile=compiled, **SMALL)
    needs, outside = answers.exact(question)["needs"], question.place.budget.outside
    for away in (-200, -40, -20, -2, 0, 2, 20, 40, 200):
        there = asked(trainer=trainer, compile=compiled, budget=f"{(needs + outside) // MiB + away}MiB", **SMALL)
        assert answers.plan(there)["fits"] == answers.exact(there)["fits"] == (away >= 0), away


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("batch", [1, 12])
def test_a_deep_run_of_nanogpts_that_cannot_fit_is_told_so_from_its_tensors_sizes(compiled: bool, batch: int) -> None:
    deep = asked(trainer="nanogpt", n_layer=48, n_head=25, n_embd=1600, batch_size=batch, compile=compiled)
    told, exact = answers.plan(deep), answers.exact(deep)
    assert (told["draft"], told["fits"], exact["fits"]) == (True, False, False)
    phases = {each["name"]: each["allocated"] for each in exact["phases"]}
    for row in told["bars"]["rows"]:
        assert sum(row["owners"].values()) == row["allocated"]
        assert 0.97 * phases[row["name"]] <= row["allocated"] <= 1.05 * phases[row["name"]]
    assert "or more" in told["words"]


@pytest.mark.parametrize("compiled", [True, False])
def test_whether_a_deep_run_fits_whose_tensors_do_is_left_open_until_it_is_replayed(compiled: bool) -> None:
    deep = asked(trainer="nanogpt", n_layer=24, n_head=16, n_embd=1024, batch_size=2, compile=compiled)
    told, whole, exact = answers.plan(deep), answers.whole(deep), answers.exact(deep)
    assert (told["draft"], told["fits"], told["verdict"]) == (True, None, "Its tensors fit")
    assert "worked out" in told["words"]
    assert (whole["draft"], whole["fits"], exact["fits"]) == (False, True, True)
    assert 0.97 * whole["peak"] <= told["peak"] <= whole["peak"]


def test_a_draft_that_is_too_near_to_the_limit_says_no_more_than_that() -> None:
    deep = dict(trainer="nanogpt", n_layer=24, n_head=16, n_embd=1024, batch_size=2)
    peak, outside = answers.plan(asked(**deep))["peak"], asked(**deep).place.budget.outside
    for off, does, verdict in ((1.06, None, "Its tensors fit"), (1.01, None, "Close to the limit"),
                               (0.995, None, "Close to the limit"), (0.98, False, "Does not fit")):
        told = answers.plan(asked(**deep, budget=f"{int((peak * off + outside) / 2**20)}MiB"))
        assert (told["draft"], told["fits"], told["verdict"]) == (True, does, verdict), off


@pytest.mark.parametrize("knobs", [dict(), dict(compile=False, bias=True, dropout=0.1), dict(recompute="input"),
                                   dict(recompute="20*input,4*all"),
                                   dict(recompute="8*input,10*products,6*all", compile=False)], ids=str)
def test_of_a_deep_run_of_fitgpts_closed_forms_know_at_once_whether_it_fits(knobs: dict[str, Any]) -> None:
    deep = dict(n_layer=24, n_head=16, n_embd=1024, batch_size=4, **knobs)
    exact, outside = answers.exact(asked(**deep)), asked(**deep).place.budget.outside
    for off, does in ((0.7, False), (0.99, False), (1.01, True), (1.3, True)):
        there = asked(**deep, budget=f"{int((exact['needs'] * off + outside) / 2**20)}MiB")
        told, whole = answers.plan(there), answers.whole(there)
        assert told["draft"]
        assert whole["fits"] == does
        assert told["fits"] in ((does,) if off in (0.7, 1.3) else (does, None))
        assert told["peak"] == pytest.approx(whole["peak"], rel=0.05 if "," in knobs.get("recompute", "") else 0.002)


def test_what_is_spared_at_least_is_never_more_than_what_is_spared() -> None:
    for deep in (dict(), dict(n_layer=24), dict(compile=False), dict(recompute="input", batch_size=4)):
        told, exact = answers.plan(asked(**deep)), answers.exact(asked(**deep))
        assert (told["fits"], exact["fits"]) == (True, True)
        assert parse_bytes(told["words"].removeprefix("at least ").removesuffix(" to spare.")) <= exact["headroom"]


def test_of_a_shallow_run_the_whole_answer_comes_at_once() -> None:
    assert not answers.plan(asked(trainer="nanogpt", n_layer=4))["draft"]
    assert not answers.plan(asked(trainer="fitgpt", n_layer=12))["draft"]
    assert not answers.plan(asked(trainer="fitgpt", n_layer=8, compile=False))["draft"]


def test_the_notes_run_does_not_fit_beside_other_programs_and_fits_alone_or_with_fitgpt() -> None:
    assert answers.plan(read(NOTES))["fits"] is False
    assert answers.plan(read(NOTES.replace("others=2118MiB", "others=0MiB")))["fits"] is None  # until it is replayed
    assert answers.whole(read(NOTES.replace("others=2118MiB", "others=0MiB")))["fits"]
    assert answers.plan(read(NOTES.replace("nanogpt", "fitgpt")))["fits"]


def test_every_card_has_the_verdict_that_planning_for_it_has() -> None:
    question = asked(others="1GiB", batch_size=24)
    rows = {row["name"]: row for row in answers.all_cards(question)["cards"]}
    expected = plan.card_verdicts(question.config, "fitgpt", 1024 * MiB)
    assert {name: row["fits"] for name, row in rows.items()} == {
        each.name: each.fits for each in expected if each.name in rows}
    assert len({row["fits"] for row in rows.values()}) == 2
    assert answers.all_cards(asked(dtype="bfloat16"))["cards"][0]["problem"] == "needs --dtype=float16"


def test_the_step_is_drawn_with_its_limit() -> None:
    html = answers.step(asked(**SMALL))["html"]
    assert 'data-chart="stacked"' in html
    assert "may be reserved" in html


# ---- what can be asked


def moved(knob: str) -> list[Any]:
    """Other values of a knob."""
    one = form.knobs_of(RunConfig)[knob]
    if one.kind == "bool":
        return [not one.default]
    if one.kind == "auto":
        return [True, False]
    if one.choices:
        return [each for each in one.choices if each != one.default]
    special: dict[str, list[Any]] = {
        "recompute": ["input"], "n_embd": [128], "n_head": [4], "dropout": [0.1], "grad_clip": [0.0],
        "init_from": ["gpt2"], "device": ["cpu"], "loss_chunk": [64], "eval_block_size": [32], "keep_last": [7],
        "out_dir": ["x"], "dataset": ["x"], "gradient_accumulation_steps": [1]}
    return special.get(knob, [one.default * 3 if one.default else 3] if one.kind in ("int", "float") else ["x"])


@cache
def tapes(config: RunConfig) -> list[Any]:
    setting = Setting((8, 9))
    return [forecast.tape_of(forecast.settled(config, setting), setting, trainer) for trainer in forecast.TRAINERS]


@pytest.mark.parametrize("knob", [field.name for field in fields(RunConfig)])
def test_the_page_has_every_knob_that_moves_memory_and_no_other(knob: str) -> None:
    base = RunConfig(**SMALL)
    moves = False
    for before in (base, replace(base, gradient_accumulation_steps=1, grad_clip=0.0, compile=False, vocab_size=50_000),
                   replace(base, optimizer="adam8bit")):
        for value in moved(knob):
            try:
                moves = moves or tapes(before) != tapes(replace(before, **{knob: value}))
            except UsageError:
                continue
    assert moves == (knob in (*KNOBS, "eval_only"))  # the page plans runs that train


def test_every_knob_of_the_page_has_a_control_with_its_help() -> None:
    controls = {one["name"]: one for group in form.form()["groups"].values() for one in group}
    assert set(controls) == set(KNOBS)
    assert all(one["help"] and one["kind"] for one in controls.values())
    assert json.dumps(form.form(), allow_nan=False)


@pytest.mark.parametrize(("file", "name"), [
    ("notes_77m", "notes_77m: 77M, float16"), ("notes_30m", "notes_30m: 30M, float16"),
    ("train_fineweb", "train_fineweb: 64M"), ("gpt2_124m", "small: 124M"), ("gpt2_350m", "medium: 350M"),
    ("gpt2_774m", "large: 774M"), ("gpt2_1558m", "XL: 1.56B"), ("shakespeare_char", "train_shakespeare_char")])
def test_a_preset_is_the_config_file_it_is_named_for(file: str, name: str) -> None:
    said = walk([str(ROOT / "config" / f"{file}.py")], RunConfig)
    found = {each.key: each.value for each in said if each.key in KNOBS}
    preset = next(each for each in PRESETS if each.name == name)
    own = {key: value for key, value in preset.knobs.items() if key != "vocab_size"}  # that one is the data's
    assert replace(RunConfig(), **found) == replace(RunConfig(), **own)


def test_presets_can_all_be_planned() -> None:
    assert len(PRESETS) == 14
    for preset in PRESETS:
        assert asked(**preset.knobs).config.n_layer >= 6


@pytest.mark.parametrize(("told", "words"), [
    (dict(n_layer=0), "at least 1"), (dict(n_embd=500), "not a multiple"), (dict(batch_size="many"), "whole number"),
    (dict(gpu="<script>"), "not a card"), (dict(dropout="nan"), "finite"), (dict(n_layer=5000), "at most 200 layers"),
    (dict(loss_chunk=1, batch_size=64), "pieces"), (dict(batch_size=2**30, block_size=2**20), "pieces"),
    (dict(others="12GiB"), "leaves nothing"), (dict(budget="1TiB"), "more than"), (dict(trainer="x"), "one of fitgpt"),
    (dict(dtype="x" * 300), "characters long"), ({f"k{n}": n for n in range(100)}, "more than 60"),
    (dict(gpu="RTX 2060", dtype="bfloat16"), "compute capability")])
def test_what_no_run_can_have_is_refused_in_a_sentence(told: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        asked(**told)


def test_nothing_in_an_address_names_a_file_that_is_then_read() -> None:
    question = asked(dataset="/etc", init_from="/etc", out_dir="/etc", **SMALL)
    assert (question.config.dataset, question.config.init_from) == (RunConfig.dataset, RunConfig.init_from)
    assert len(question.passed_over) == 3
    assert "'dataset' is not a setting of this page" in answers.plan(question)["notes"][0]


def test_a_refusal_that_spells_out_its_fix_can_be_mended_with_a_button() -> None:
    assert flags_in("--dtype=float16") == {"dtype": "float16"}
    assert flags_in("--n_head=7 or --n_head=14") == {"n_head": "7"}
    assert flags_in("--recompute='4*no_wide,8*products' …") == {"recompute": "4*no_wide,8*products"}
    assert flags_in("fitgpt plan --gpu 4070") == {}
    assert flags_in("--out_dir=/x") == {}


# ---- taking it along


@pytest.mark.parametrize("told", [
    {}, dict(recompute="4*no_wide,8*products", bias=True, dropout=0.1, others="2118MiB", budget="8GiB", torch="2.11")])
def test_the_command_and_the_config_file_mean_the_config_shown(told: dict[str, Any], tmp_path: Path) -> None:
    question = asked(**told)
    words = shlex.split(plan_command(question))[2:]
    found = {each.key: each.value for each in walk(words, options_of(VERBS["plan"]))}
    told_of_the_place = {key: getattr(question.questions, key) for key in QUESTIONS}
    defaults = RunConfig().to_dict() | asdict(PlanQuestions())
    assert defaults | found == defaults | question.config.to_dict() | told_of_the_place
    file = tmp_path / "x.py"
    file.write_text(config_file(question, "a comment"), encoding="utf-8")
    for typed in (shlex.split(command(question))[2:], [str(file)]):
        trained = replace(question.config, budget=question.questions.budget)
        assert replace(RunConfig(), **{each.key: each.value for each in walk(typed, RunConfig)}) == trained


def test_nanogpt_is_told_only_what_its_command_line_knows() -> None:
    question = asked(trainer="nanogpt", eval_batch_size=2, vocab_size=65, cuda_graphs=False, recompute="input",
                     n_layer=6)
    assert command(question) == "python train.py --n_layer=6"
    assert "--vocab_size=65" in plan_command(question)
    assert "meta.pkl: 65 there" in config_file(question, "")
    assert "vocab_size =" not in config_file(question, "")


def test_the_page_says_what_the_compiler_finds_out_by_timing() -> None:
    told = [answers.plan(asked(trainer="nanogpt", vocab_size=size, n_layer=2))["notes"] for size in (50304, 50257)]
    assert [any("no multiple of 8" in note for note in notes) for notes in told] == [False, True]


# ---- the buttons


@pytest.mark.parametrize("query", [NOTES, NOTES.replace("nanogpt", "fitgpt").replace("=16&", "=64&"), "gpu=RTX+4070"])
def test_each_fix_does_what_it_promises(query: str) -> None:
    question = read(query)
    before = answers.whole(question)
    buttons = [found for family in fixes.families(question)["families"]
               if (found := fixes.fix(question, family)["fix"])]
    assert len(buttons) >= 3
    for button in buttons:
        said = dict(pair.split("=", 1) for pair in query.replace("+", " ").split("&"))
        after = answers.whole(read(urlencode(said | button["settings"])))
        assert (after["fits"], after["peak"]) == (button["fits"], button["peak"]), button["label"]
        assert before["peak"] - after["peak"] == button["saved"]
        assert set(button["settings"]) <= {*KNOBS, *CARRIED, "trainer"}


def test_as_few_layers_are_recomputed_as_make_it_fit() -> None:
    query = "gpu=RTX+4070&batch_size=48&budget=9GiB"
    button = fixes.fix(read(query), "recompute")["fix"]
    count = int(re.match(r"recompute (\d+) layers?", button["label"])[1])  # type: ignore[index]
    level = re.search(r"\*(\w+),", button["settings"]["recompute"])[1]  # type: ignore[index]
    assert not answers.plan(read(query))["fits"]
    for layers, enough in ((count, True), (count - 1, False)):
        fewer = f"{layers}*{level},{12 - layers}*products" if layers else "products"
        assert answers.plan(read(f"{query}&recompute={fewer}"))["fits"] == enough


def test_the_notes_run_is_offered_fitgpt_first() -> None:
    question = read(NOTES)
    assert fixes.families(question)["families"][0] == "trainer"
    assert fixes.fix(question, "trainer")["fix"]["label"] == "train it with fitgpt"


def test_every_family_of_changes_has_words_of_its_own() -> None:
    found = {option.change.family for trainer in ("fitgpt", "nanogpt") for compiled in (True, False)
             for option in single_changes(replace(RunConfig(), compile=compiled, gradient_accumulation_steps=1,
                                                  grad_clip=0.0, vocab_size=50304, casts="kept", gradients="kept",
                                                  states="late"), trainer)}
    assert found | {"accumulation"} == set(fixes.LABELS)


def test_fitting_gives_settings_that_fit_with_their_reasons() -> None:
    question = asked(batch_size=24, budget="2GiB", n_layer=2)
    assert not answers.plan(question)["fits"]
    found = fitted.fitted(question)
    after = asked(**({"batch_size": 24, "budget": "2GiB", "n_layer": 2} | found["settings"]))
    assert answers.exact(after)["fits"]
    assert after.config.tokens_per_step == question.config.tokens_per_step
    assert any("batch_size 24 →" in why for why in found["why"])
    assert not any("left free" in why for why in found["why"])  # a budget is taken as it was said
    assert "128.0 MiB of the card are left free" in fitted.fitted(asked(n_layer=2))["why"][-1]
    with pytest.raises(DoesNotFit, match="least memory"):
        fitted.fitted(asked(budget="600MiB", n_layer=2))


def test_fitting_keeps_to_the_limits_that_fit_keeps_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin of a card known by rule, the host's memory, and a small micro-batch beside somebody else's program."""
    heres: list[Any] = []
    monkeypatch.setattr(fitted, "fit", lambda config, here: (heres.append(here), fit(config, here))[1])
    question = asked(**SMALL)
    fitted.fitted(question)
    assert heres[0].budget.reserve_limit == question.place.budget.reserve_limit - fitting.UNSURE
    assert heres[0].host_bytes == int(host.SHARE * fitting.ASSUMED_HOST)
    assert heres[0].most_batch is None
    fitted.fitted(asked(**SMALL, budget="2GiB"))
    assert heres[1].budget.reserve_limit == asked(**SMALL, budget="2GiB").place.budget.reserve_limit

    monkeypatch.setattr(fitting, "someone_computes", lambda device: True)
    monkeypatch.setattr(host, "available_memory", lambda: 10 * GiB)
    here = question._replace(questions=replace(question.questions, gpu=""))
    told = fitted.fitted(here)
    assert (heres[2].most_batch, heres[2].host_bytes) == (4, 8 * GiB)
    assert "Somebody else computes" in told["why"][0]


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_a_speed_is_given_on_cards_whose_figures_are_known(trainer: str) -> None:
    told = answers.exact(asked(trainer=trainer, **SMALL))
    assert re.fullmatch(r"[\d.]+[kM]–[\d.]+[kM]", told["speed"])
    assert any(what == "speed" and told["speed"] in words for what, words in told["facts"])
    assert all(row["speed"] for row in answers.all_cards(asked(trainer=trainer, **SMALL))["cards"]
               if row["name"].startswith("RTX 40"))


# ---- the rest


def test_a_pasted_message_is_explained_with_and_without_the_plan() -> None:
    text = (ROOT / "tests" / "explain" / "messages" / "nanogpt-88.txt").read_text(encoding="utf-8")
    assert "394.0 MiB were asked for" in pasted.explain(text, None)["title"]
    told = pasted.explain("CUDA out of memory. Tried to allocate 3.07 GiB (GPU 0; 11.65 GiB total capacity; 7.10 GiB "
                          "already allocated; 1.10 GiB free; 7.30 GiB reserved in total by PyTorch)",
                          NOTES + "&compile=False")
    assert "16 × 1,024 × 50,304 × 4" in told["what"]
    assert any(remedy["settings"] for remedy in told["remedies"])
    assert pasted.explain("", None)["title"] == "Nothing was pasted."
    assert "does not guess" in pasted.explain("<script>alert(1)</script>", None)["title"]


def test_a_mistake_is_a_problem_and_a_crash_is_called_a_bug(capfd: pytest.CaptureFixture[str]) -> None:
    known = worker.table()
    told = worker.answered({"ask": "plan", "query": "n_embd=500&gpu=4070"}, known)["problem"]
    assert told["settings"] == {"n_head": "10"} or "--n_head" in told["fix"]
    assert "bug of ours" in worker.answered({"ask": "explain", "text": None, "query": None}, known)["bug"]
    assert "AttributeError" in capfd.readouterr().err


def test_a_run_is_shown_with_its_card_its_memory_and_its_neighbours() -> None:
    run = RunState("runs/x", "running", "process 5", 1.0, "RTX 4070", "train", 10, 100, math.nan, 2.5, 5e4, 0.41, 60.0,
                   MemoryReading(GiB, 2 * GiB, GiB, 2 * GiB), 3 * GiB, GiB, losses=(3.0, math.nan, 2.0))
    card = CardState(0, "RTX 4070", 9 * GiB, 2 * GiB, 11 * GiB, 97, 180.0, 200.0, 71,
                     programs=(Program(5, "python", 8 * GiB, "run"), Program(6, "Xorg", GiB)))
    told = live.seen(WatchFrame(0.0, (card,), "", run, Track((GiB, 8 * GiB), ((1, "train"),))))
    tiles = {what: (figure, more) for what, figure, more in told["tiles"]}
    assert tiles["loss"] == ("nan", "validation 2.5000")
    assert tiles["reserved"] == ("2.00 GiB", "planned 3.00 GiB")
    assert tiles["RTX 4070"] == ("9.00 GiB of 11.00 GiB", "97 % busy, 71 °C, 180 W")
    assert [each["name"] for each in told["programs"]] == ["python", "Xorg"]
    assert "a spike in train" in told["charts"]
    assert json.dumps(told, allow_nan=False)


def test_without_a_run_the_live_tab_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert live.Live("").look()["run"] is None
    assert live.Live("").look()["why"]
