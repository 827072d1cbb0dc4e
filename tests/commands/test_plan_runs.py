"""`fitgpt plan`: the run that is planned: its length, its data, its vocabulary, what it starts from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fitgpt
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import MiB
from fitgpt.planning.forecast import recorded_runs
from fitgpt.runs.folder import open_run
from tests.plan_command import SMALL, write_chars


def test_the_length_is_shown_in_tokens_and_epochs(run_plan: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=81_920)
    document = run_plan(*SMALL, "--gpu=4070", "--dataset=letters", "--gradient_accumulation_steps=2", "--json").json
    planned_run = document["run"]
    assert (planned_run["tokens_per_step"], planned_run["steps"], planned_run["tokens"]) == (2 * 8 * 256, 100, 409_600)
    assert planned_run["epochs"] == 5
    assert planned_run["tokens_per_param"] == planned_run["tokens"] / planned_run["params"]
    assert planned_run["checkpoint_bytes"] > 12 * planned_run["params"]


def test_tokens_and_epochs_become_steps(run_plan: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=81_921)
    argv = [*SMALL[:-1], "--gpu=4070", "--dataset=letters", "--gradient_accumulation_steps=1"]
    for million in ("1M", "1e6", "1_000_000"):
        counted = run_plan(*argv, f"--tokens={million}")
        assert "are 489 steps: max_iters=489 lr_decay_iters=489." in " ".join(counted.out.split())
        assert "warmup_iters=2000 is above lr_decay_iters=489" in counted.out
    assert run_plan(*argv, "--epochs=2", "--json").json["run"]["steps"] == 81  # 80 whole steps and a token


def test_hours_become_steps_that_take_no_longer(run_plan: Any) -> None:
    for trainer in ("fitgpt", "nanogpt"):
        argv = [*SMALL[:-1], "--gpu=4070", f"--trainer={trainer}", "--json"]
        for hours in (0.01, 8, 7.3):
            run = run_plan(*argv, f"--hours={hours}").json["run"]
            assert run["hours"][1] <= hours < run["hours"][1] * (run["steps"] + 1) / run["steps"]
        assert run_plan(*argv, "--hours=1e-9").json["run"]["steps"] == 1


def test_a_plan_of_nanogpt_has_a_duration(run_plan: Any) -> None:
    low, high = run_plan(*SMALL, "--gpu=4070", "--trainer=nanogpt", "--json").json["run"]["hours"]
    assert 0 < low < high
    longer = run_plan(*SMALL[:-1], "--gpu=4070", "--trainer=nanogpt", "--hours=8").out
    assert re.search(r"on disk, \d+ h \d+ min to 7 h 59 min|on disk, \d+ h \d+ min to 8 h", " ".join(longer.split()))


def test_one_step_is_singular(run_plan: Any) -> None:
    output = " ".join(run_plan(*SMALL[:-1], "--gpu=4070", "--tokens=1").out.split())
    assert "× 1 step = " in output
    assert "are 1 step: max_iters=1 " in output
    assert "× 100 steps = " in run_plan(*SMALL, "--gpu=4070").out


def test_the_vocabulary_comes_from_the_data(run_plan: Any, tmp_path: Path) -> None:
    def params(*argv: str) -> int:
        return int(run_plan(*SMALL, "--gpu=4070", "--json", *argv).json["params"])

    write_chars(tmp_path / "data" / "letters", train=1000)
    shape = dict(n_layer=2, n_head=4, n_embd=256, block_size=256)
    for vocab, argv in ((65, ["--dataset=letters"]), (50304, ["--dataset=nowhere"]),
                        (777, ["--dataset=letters", "--vocab_size=777"])):
        assert params(*argv) == RunConfig(**shape, vocab_size=vocab).gpt_config().count_params()  # type: ignore[arg-type]
    assert "There is no dataset 'nowhere' here." in run_plan(*SMALL, "--gpu=4070", "--dataset=nowhere").out


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
@pytest.mark.parametrize(("train", "val", "missing"), [(256, 257, "train"), (257, 256, "val"), (257, 257, "")])
def test_data_shorter_than_a_window_gives_a_note(run_plan: Any, tmp_path: Path, trainer: str, train: int, val: int,
                                                 missing: str) -> None:
    write_chars(tmp_path / "data" / "few", train=train, val=val)
    notes = run_plan(*SMALL, "--gpu=4070", "--dataset=few", f"--trainer={trainer}", "--json").json["notes"]
    said = [note for note in notes if "in a row" in note]
    assert len(said) == bool(missing)
    assert all(f"257 tokens in a row, and the {missing} split has 256." in note and note.endswith("--block_size=255")
               for note in said)


def test_a_run_on_the_cpu_gives_a_note(run_plan: Any) -> None:
    for device, is_said in (("cpu", True), ("mps", True), ("cuda", False)):
        note = f"With --device={device} no GPU is used: the plan is for the GPU named."
        assert (note in run_plan(*SMALL, "--gpu=4070", f"--device={device}", "--json").json["notes"]) == is_said


def test_options_that_nanogpt_lacks_do_not_change_its_checkpoint_or_cpu_ram(run_plan: Any) -> None:
    def run(*flags: str) -> dict[str, Any]:
        return dict(run_plan(*SMALL, "--gpu=4070", "--trainer=nanogpt", "--json", *flags).json["run"])

    as_it_is = run()
    for flags in (["--optimizer=adam8bit"], ["--optimizer=muon"], ["--weights=bfloat16"], ["--offload=gradients"]):
        assert {key: run(*flags)[key] for key in ("checkpoint_bytes", "host_bytes")} == {
            key: as_it_is[key] for key in ("checkpoint_bytes", "host_bytes")}


def test_hours_too_short_for_a_step_give_a_note(run_plan: Any) -> None:
    assert any(note.endswith("One step takes longer.") for note in
               run_plan(*SMALL[:-1], "--gpu=4070", "--hours=0.0000001", "--json").json["notes"])


@pytest.mark.parametrize(("init", "is_said"), [("scratch", True), ("gpt2", False)])
def test_a_padded_vocabulary_is_suggested_only_where_it_can_be_chosen(run_plan: Any, init: str, is_said: bool) -> None:
    notes = run_plan("--gpu=h200", "--trainer=nanogpt", "--vocab_size=50257", f"--init_from={init}", "--compile=True",
                     "--json").json["notes"]
    assert any("50,257 is not a multiple of 8" in note and ("50,264 in the data's meta.pkl" in note) == is_said
               for note in notes)


def test_damaged_data_gives_a_note_and_a_plan(run_plan: Any, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "torn"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(b"abc")
    (folder / "val.bin").write_bytes(b"abcd")
    answer = run_plan(*SMALL, "--gpu=4070", "--dataset=torn")
    assert answer.code == 0
    assert "an odd number" in " ".join(answer.out.split())


def test_pretrained_weights_set_the_shape(run_plan: Any, tmp_path: Path) -> None:
    assert run_plan("--init_from=gpt2", "--gpu=4090", "--json").json["params"] == 124_439_808
    shape = {"n_layer": 3, "n_head": 2, "n_embd": 64, "vocab_size": 300}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 96, **shape}))
    for block, flags in ((96, ()), (96, ("--block_size=512",)), (64, ("--block_size=64",))):
        document = run_plan("--init_from=mine", "--gpu=4070", "--json", *flags).json
        expected = RunConfig(**shape, block_size=block, bias=True)  # type: ignore[arg-type]
        assert document["params"] == expected.gpt_config().count_params()
        assert document["needs_bytes"] == fitgpt.plan(expected, "4070").forecast.needs


def test_a_run_folder_in_init_from_sets_the_shape(run_plan: Any, tmp_path: Path) -> None:
    first = RunConfig(n_layer=2, n_head=2, n_embd=64, block_size=96, vocab_size=65, bias=True, out_dir="runs/a")
    with open_run("runs/a", first.to_dict(), resume=False) as folder:
        folder.record(first.to_dict())
    checkpoint = tmp_path / "runs" / "a" / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    for named in ("runs/a", "runs/a/checkpoints/step-00000010"):
        document = run_plan(f"--init_from={named}", "--n_layer=12", "--gpu=4070", "--json").json
        assert document["params"] == first.gpt_config().count_params()
        assert any("n_layer=2, n_head=2, n_embd=64, block_size=96" in note for note in document["notes"])


def test_a_folder_without_weights_is_an_error(run_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "llama", "n_layer": 3}')
    for name, message in (("empty", "holds no weights to start from"), ("llama", "does not describe a GPT-2")):
        answer = run_plan(f"--init_from={name}", "--gpu=4070")
        assert (answer.code, answer.out) == (3, "")
        assert message in answer.err


def test_a_note_says_that_the_shape_of_ckpt_pt_is_unknown(run_plan: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "ckpt.pt").write_bytes(b"")
    document = run_plan(*SMALL, "--init_from=theirs", "--gpu=4070", "--json").json
    assert any("only `train` can read" in note for note in document["notes"])


def test_a_resume_is_planned_with_the_recorded_config(run_plan: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=1000)
    config = RunConfig(n_layer=2, n_head=2, n_embd=64, dataset="letters", out_dir="runs/a", vocab_size=65)
    with open_run("runs/a", config.to_dict(), resume=False) as folder:
        folder.record(config.to_dict())
    (tmp_path / "runs" / "a" / "checkpoints" / "step-00000010").mkdir(parents=True)
    document = run_plan("--resume", "--out_dir=runs/a", "--gpu=4070", "--json").json
    assert document["params"] == config.gpt_config().count_params()


def test_where_sampling_has_the_peak_the_owners_are_those_of_sampling(run_plan: Any) -> None:
    """It takes float32 weights onto the GPU, which a run with rounded weights and all else on the host does not."""
    document = run_plan(*SMALL, "--vocab_size=65", "--n_layer=8", "--block_size=16", "--batch_size=1",
                        "--weights=bfloat16", "--offload=gradients", "--saved_activations=input", "--gpu=4070",
                        "--json").json
    assert document["peak"]["phase"] == "sample"
    assert sum(document["owners"].values()) == document["phases"]["sample"]["allocated_bytes"]
    assert document["formulas"]["weights"].endswith(" × 4 bytes")
    assert document["formulas"]["activations"].startswith("16 tokens × 256 × 32 bytes")


@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_eval_only_has_no_optimizer_state_and_no_gradients(run_plan: Any, trainer: str) -> None:
    flags = [*SMALL, f"--trainer={trainer}", "--gpu=4070", "--eval_only"]
    document = run_plan(*flags, "--json").json
    assert [phase for phase, held in document["phases"].items() if held] == ["load", "first_eval"]
    assert not {"optimizer", "gradients"} & set(document["owners"])
    assert (document["run"]["steps"], document["step_seconds"]) == (0, None)
    assert "evaluates once, and does not train" in run_plan(*flags).out
    budget = document["needs_bytes"] + document["outside_bytes"] - MiB
    tight = run_plan(*flags, f"--budget={budget}", "--options", "--json")
    assert tight.code == 1
    assert tight.json["changes"]


def test_a_plan_file_of_fit_sets_the_options(run_plan: Any, tmp_path: Path) -> None:
    config = RunConfig(n_layer=2, n_head=4, n_embd=256, batch_size=2, block_size=128).to_dict()
    (tmp_path / "my.plan.json").write_text(json.dumps({"schema": 2, "config": config}))
    from_plan_file, from_flags = (run_plan(*flags, "--gpu=4070", "--json").json for flags in (
        ["--plan=my.plan.json"], ["--n_layer=2", "--n_head=4", "--n_embd=256", "--batch_size=2", "--block_size=128"]))
    assert from_plan_file["needs_bytes"] == from_flags["needs_bytes"]
    assert run_plan("--plan=nowhere.json", "--gpu=4070").code == 2
    assert "`fitgpt fit` with the same options" in " ".join(run_plan(*SMALL, "--gpu=4070", "--fit").out.split())


def test_the_environment_selects_the_allocator(run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {}
    for said in ("", "expandable_segments:True", "expandable_segments:False", "max_split_size_mb:128"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", said)
        kinds[said] = [run_plan(*SMALL, "--gpu=4070", f"--trainer={trainer}", "--json").json["assumes"]["allocator"]
                       for trainer in ("fitgpt", "nanogpt")]
    expandable, native = "expandable segments", "native"
    assert list(kinds.values()) == [[expandable, native], [expandable] * 2, [native] * 2, [native] * 2]


@pytest.mark.parametrize(("version", "message"), [
    ("2.11", "2.11 (measured on an H200)"), ("2.11.0+cu130", "2.11 (measured on an H200)"),
    ("2.15.0", "2.15 (not measured; allocator read in its headers; cuBLAS workspace and attention kernels read in its "
     "binaries; compiler assumed as in 2.11)"),
    ("2.16.0a0+git12ab", "2.16 (not known; the rules of 2.15 are used, the nearest known version)"),
    ("2.9", "2.9 (not known; the rules of 2.11 are used, the nearest known version)"),
    ("9.9", "9.9 (not known; the rules of 2.15 are used, the nearest known version)")])
def test_a_plan_states_how_the_rules_of_a_torch_version_are_known(
        run_plan: Any, version: str, message: str) -> None:
    assert run_plan(*SMALL, "--gpu=4070", f"--torch={version}", "--json").json["assumes"]["torch"] == message


@pytest.mark.reproduction
@pytest.mark.parametrize("version", ["2.8", "2.15", "3.0"])
def test_the_accuracy_of_a_version_without_recorded_runs_is_not_claimed(run_plan: Any, version: str) -> None:
    def accuracy(version: str) -> str:
        output = " ".join(run_plan(*SMALL, "--gpu=4070", f"--torch={version}").out.split())
        return output.partition("accuracy ")[2].partition(" nearest ")[0]

    assert accuracy("2.11").startswith("worst error ")
    assert accuracy(version) == f"no recorded runs of torch {version}; with 2.11: {accuracy('2.11')}"


def test_options_that_nanogpt_lacks_give_a_note(run_plan: Any) -> None:
    output = " ".join(run_plan(*SMALL, "--trainer=nanogpt", "--gpu=4070", "--eval_batch_size=2").out.split())
    assert "nanoGPT's train.py ignores eval_batch_size=2" in output


def test_nanogpt_runs_bfloat16_eagerly_on_a_gpu_without_it(run_plan: Any) -> None:
    document = run_plan(*SMALL, "--gpu=t4", "--trainer=nanogpt", "--dtype=bfloat16", "--json").json
    assert document["assumes"]["compile"] == "eager"
    assert any("torch.compile does not support bfloat16 on this GPU" in note for note in document["notes"])
    eager = run_plan(*SMALL, "--gpu=t4", "--trainer=nanogpt", "--dtype=bfloat16", "--compile=False", "--json").json
    assert (document["needs_bytes"], document["phases"]) == (eager["needs_bytes"], eager["phases"])
    by_itself = run_plan(*SMALL, "--gpu=t4", "--trainer=nanogpt", "--json").json
    assert by_itself["assumes"]["compile"] == "compiled"
    assert any("--dtype=bfloat16 plans that" in note for note in by_itself["notes"])


def test_a_note_says_that_nanogpt_reads_its_vocabulary_from_the_data(run_plan: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=81_920)
    argv = [*SMALL, "--gpu=4070", "--dataset=letters", "--trainer=nanogpt"]
    said = [note for note in run_plan(*argv, "--vocab_size=512", "--json").json["notes"] if "no vocab_size" in note]
    assert said == ["nanoGPT's train.py has no vocab_size: it uses the one in the data's meta.pkl, or 50304, here "
                    "65. This plan is for 512."]
    assert not [note for note in run_plan(*argv, "--json").json["notes"] if "no vocab_size" in note]


@pytest.mark.parametrize(("flags", "message"), [
    (["--vocab_size=50257"], "A vocabulary of 50,257 is not a multiple of 8"),
    (["--vocab_size=50304", "--batch_size=3", "--block_size=250"],
     "750 tokens per micro-batch are not a multiple of 8")])
def test_sizes_that_the_compiler_may_pad_give_a_note(run_plan: Any, flags: list[str], message: str) -> None:
    document = run_plan(*SMALL, "--gpu=h200", "--trainer=nanogpt", "--compile=True", *flags, "--json").json
    assert any(message in note for note in document["notes"])
    assert document["assumes"]["compile"] == "compiled, odd sizes padded as on an H200"
    kept = [row for row in recorded_runs() if "odd sizes" in row["trainer"]]
    assert document["track_record"]["recorded_runs_in_all"] == len(kept) > 40
    eager = run_plan(*SMALL, "--gpu=h200", "--trainer=nanogpt", "--compile=False", *flags, "--json").json
    assert not any(message in note for note in eager["notes"])


def test_allocator_options_that_are_not_modelled_give_a_note(
        run_plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = {}
    for document in ("expandable_segments:True", "max_split_size_mb:128,expandable_segments:True",
                     "roundup_power2_divisions:[256:1,512:2,>:4]"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", document)
        notes[document.split(":")[0]] = [note for note in run_plan(*SMALL, "--gpu=4070", "--json").json["notes"]
                                         if "The forecast does not model" in note]
    assert [len(each) for each in notes.values()] == [0, 1, 1]
    assert "sets max_split_size_mb for" in notes["max_split_size_mb"][0]
    assert "sets roundup_power2_divisions for" in notes["roundup_power2_divisions"][0]
