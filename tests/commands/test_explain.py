"""`fitgpt explain` as it is typed: what it takes, what it prints, how it ends."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands.main import main
from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, MiB
from fitgpt.diagnosis.diagnose import Diagnosis, MemoryShare
from fitgpt.diagnosis.plan_or_run import compare_phases, explain_plan, recorded_plan
from fitgpt.diagnosis.rules import RULES
from fitgpt.hardware.nvidia import Survey
from fitgpt.planning.budget import budget_for, unnamed
from fitgpt.planning.forecast import MemoryPlan
from fitgpt.planning.plan_file import plan_from
from fitgpt.runs.folder import RunFolder, open_run
from fitgpt.show.diagnosis_text import diagnosis_text
from tests.diagnosis.test_diagnose import CARD, ROOT, notes_77m, run_out
from tests.diagnosis.test_reading import SCREEN

CONFIG = str(ROOT / "config" / "notes_77m.py")
SHALLOW = [CONFIG, "--n_layer=2"]  # which fails at the same tensor, and is replayed faster
MESSAGES = Path(__file__).parents[1] / "diagnosis" / "messages"


@pytest.fixture
def no_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def json_output(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.fixture
def eager_message() -> str:
    return run_out(notes_77m("nanogpt", "--compile=False", "--n_layer=2"), others_mib=2118)[0].text


def test_a_file_and_a_config_name_the_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "docs" / "examples" / "oom_77m.txt")
    assert main(["explain", file, CONFIG, "--compile=False", "--trainer=nanogpt", "--gpu=4070"]) == 0
    printed = capsys.readouterr().out
    assert "16 × 1,024 × 50,304 × 4 bytes" in printed
    assert "OOM-LOGITS" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_the_message_may_be_the_argument(capsys: pytest.CaptureFixture[str], no_stdin: None,
                                         eager_message: str) -> None:
    assert len(eager_message.encode()) > 255  # too long to be a file's name
    assert main(["explain", eager_message, *SHALLOW, "--compile=False", "--trainer=nanogpt", "--gpu=4070"]) == 0
    assert "16 × 1,024 × 50,304 × 4 bytes" in capsys.readouterr().out
    assert main(["explain", "x" * 300]) == 2
    assert "There is no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "expected"), [
    (["6582MiB / 12282MiB"], "6,582 MiB of the GPU are used."),
    (["6582, 12282"], "Numbers without a unit are taken as MiB"),
    (["--reading", "6582", "--process", "4464", "--gpu", "4070"], "4,464 by this process, 2,118 by others"),
    (["--reading=6582", "--others=2118"], "4,464 by this process, 2,118 by others"),
    (["--process=4464", "--others=2118"], "6,582 MiB of the GPU are used"),
    (["--reading", "6,5GiB"], "6,656 MiB of the GPU are used"),
    (["run.sh: line 14: 12345 Killed  python train.py"], "The process was killed"),
    (["the GPU has no memory left"], "in a form that fitgpt knows"),
])
def test_what_people_type_is_understood(argv: list[str], expected: str, no_stdin: None,
                                        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fitgpt.diagnosis.reading.survey", Survey)
    assert main(["explain", *argv]) == ("fitgpt knows" in expected)
    assert expected in " ".join(capsys.readouterr().out.split())


def test_what_was_given_is_not_called_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              eager_message: str) -> None:
    (tmp_path / "oom.txt").write_text(eager_message)
    assert main(["explain", str(tmp_path / "oom.txt"), *SHALLOW, "--compile=False", "--gpu=4070", "--json"]) == 0
    answer = json_output(capsys)
    assert any(note.startswith("The trainer was not given: eager nanoGPT (--trainer=nanogpt) explains the message")
               for note in answer["notes"])
    assert "keeps for its backward pass" not in answer["what"]  # an evaluation has none
    assert "tape" not in json.dumps(answer)


def test_a_file_named_like_a_message_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], no_stdin: None,
                                             eager_message: str) -> None:
    file = tmp_path / "CUDA out of memory. Tried to allocate 20.00 MiB"
    file.write_text(eager_message)
    assert main(["explain", str(file), *SHALLOW, "--compile=False", "--trainer=nanogpt", "--gpu=4070"]) == 0
    assert "16 × 1,024 × 50,304 × 4 bytes" in capsys.readouterr().out


def test_an_eager_traceback_does_not_make_fitgpt_eager(
        capsys: pytest.CaptureFixture[str], no_stdin: None, eager_message: str) -> None:
    traceback = f'''Traceback (most recent call last):
  File "/home/me/nanoGPT/train.py", line 300, in <module>
    logits, loss = model(X, Y)
  File "/home/me/nanoGPT/model.py", line 187, in forward
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
{eager_message}'''
    assert main(["explain", traceback, *SHALLOW, "--trainer=nanogpt", "--gpu=4070", "--json"]) == 0
    answer = json_output(capsys)
    assert "The traceback shows that it ran eager: --compile=False." in answer["notes"]
    assert answer["remedies"][0]["todo"] == f"fitgpt train {CONFIG} --n_layer=2"


def test_the_trainer_is_inferred_from_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               eager_message: str) -> None:
    """fitgpt never allocates all logits at once, so a message about 3.07 GiB of them is nanoGPT's."""
    (tmp_path / "oom.txt").write_text(eager_message)
    assert main(["explain", str(tmp_path / "oom.txt"), f"--config={CONFIG}", "--n_layer=2", "--compile=False",
                 "--json"]) == 0
    assert "nanoGPT's train.py" in json.dumps(json_output(capsys), ensure_ascii=False)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("trainer", ["fitgpt", "nanogpt"])
def test_trainer_and_compile_mode_are_inferred(trainer: str, compiled: bool, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    other_programs = {"fitgpt": 10700, "nanogpt": 5600}[trainer]
    failed, _ = run_out(notes_77m(trainer, f"--compile={compiled}", "--n_layer=2"), other_programs)
    (tmp_path / "oom.txt").write_text(failed.text)
    assert main(["explain", str(tmp_path / "oom.txt"), f"--config={CONFIG}", "--n_layer=2", "--gpu=4070",
                 "--json"]) == 0
    found = json_output(capsys)
    assert "Replayed with the same limit, the forecast runs out of memory at exactly this allocation" in found["what"]
    assert any(f"(--trainer={trainer} --compile={compiled}) explains the message" in note for note in found["notes"])


def test_a_given_compile_mode_that_the_message_contradicts_is_named(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], eager_message: str) -> None:
    """A config file says compile=True, and the run was started with --compile=False."""
    (tmp_path / "oom.txt").write_text(eager_message)
    argv = ["explain", str(tmp_path / "oom.txt"), *SHALLOW, "--compile=True", "--gpu=4070", "--json"]
    assert main(argv) == 0
    found = json_output(capsys)
    assert "16 × 1,024 × 50,304 × 4 bytes" in found["what"]
    assert ("With --compile=True, as given, no allocation has this size: eager nanoGPT (--compile=False) explains the "
            "message.") in found["notes"]
    (tmp_path / "oom.txt").write_text(eager_message.replace("3.07 GiB", "3.05 GiB"))
    assert main(argv) == 0
    assert "with compiled fitgpt or compiled nanoGPT has this size" in json_output(capsys)["what"]


def test_a_given_trainer_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str], eager_message: str) -> None:
    (tmp_path / "oom.txt").write_text(eager_message)
    assert main(["explain", str(tmp_path / "oom.txt"), *SHALLOW, "--trainer=fitgpt", "--gpu=4070", "--json"]) == 0
    assert "with compiled fitgpt or eager fitgpt has this size" in json_output(capsys)["what"]


def test_piped_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (MESSAGES / "trl-5207.txt").read_text()
    for argv in (["explain"], ["explain", "-"]):
        piped(monkeypatch, text)
        assert main([*argv, "--json"]) == 0
        assert json_output(capsys)["causes"][0]["code"] == "OOM-NEIGHBOUR"


def test_unknown_text_exits_with_1(monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    piped(monkeypatch, "Segmentation fault (core dumped)\n")
    assert main(["explain"]) == 1
    printed = capsys.readouterr().out
    assert "does not guess" in printed
    assert "the whole message" in printed


def test_nothing_to_explain_is_a_usage_error(no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2
    assert main(["explain", "no/such/file"]) == 2
    assert main(["explain", "--reading=lots"]) == 2
    assert main(["explain", "--trainer=keras"]) == 2


def test_empty_piped_input_beside_a_config_is_noted(no_stdin: None,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    for sources, empty in (([], False), (["-"], True)):
        assert main(["explain", *sources, *SHALLOW, "--gpu=4070"]) == 0
        assert ("The piped input is empty" in capsys.readouterr().out) is empty


def test_two_figures_are_explained_without_a_file(no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", "--reading", "6582MiB", "--process", "4464MiB", "--gpu", "4070",
            str(ROOT / "config" / "notes_30m.py"), "--trainer=nanogpt"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "4,464 by this process, 2,118 by others" in printed
    assert main([*argv, "--json"]) == 0
    assert sum(share["nbytes"] for share in json_output(capsys)["shares"]) == 6582 * MiB


def test_a_reading_without_a_card_uses_the_card_that_plan_assumes(
        monkeypatch: pytest.MonkeyPatch, no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fitgpt.diagnosis.reading.survey", Survey)
    config = str(ROOT / "config" / "notes_30m.py")
    assert main(["explain", "--reading=6582MiB", "--process=4464MiB", config, "--json"]) == 0
    answer = json_output(capsys)
    shares = {share["what"]: share["nbytes"] for share in answer["shares"]}
    assert sum(shares.values()) == 6582 * MiB
    assert shares["logits"] == 16 * 512 * 50304 * 6
    assumed = unnamed(others=None, budget=6582 * MiB).budget
    assert shares["this process outside PyTorch"] == assumed.outside
    assert assumed.sources[0] in answer["notes"]
    assert any("--gpu" in each for each in answer["needed"])


def test_a_named_gpu_without_figures_is_noted_and_not_listed_as_needed(no_stdin: None,
                                                                       capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "config" / "notes_30m.py")
    assert main(["explain", "--reading=6582MiB", "--process=4464MiB", "--gpu=7900 XTX", config, "--json"]) == 0
    answer = json_output(capsys)
    assert any(note.startswith("RX 7900 XTX: ") for note in answer["notes"])
    assert not answer["needed"]


def test_nvidia_smi_output_is_recognised(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    piped(monkeypatch, SCREEN)
    assert main(["explain", str(ROOT / "config" / "notes_30m.py"), "--trainer=nanogpt", "--json"]) == 0
    assert json_output(capsys)["subject"] == "reading"


def test_a_config_alone_is_explained_on_a_card(no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", CONFIG, "--gpu=4070", "--trainer=nanogpt", "--others=2118MiB", "--compile=False"]) == 0
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "64% of that is logits" in printed
    assert "fitgpt train" in printed


def test_others_can_be_given_for_a_message_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(MESSAGES / "nanogpt-208.txt")
    assert main(["explain", file, "--others=1.5GiB", "--json"]) == 0
    shares = {share["what"]: share["nbytes"] for share in json_output(capsys)["shares"]}
    assert shares["other processes"] == pytest.approx(1.5 * 1024 * MiB, abs=20 * MiB)


# ---- run folders and plans


def make_run(folder: Path, **facts: Any) -> RunFolder:
    config = notes_77m("fitgpt", "--n_layer=2").resolved
    run = open_run(folder, config.to_dict(), resume=False)
    run.record(config.to_dict())
    run.append_metrics({"kind": "run", "device": "cuda:0", "device_name": "NVIDIA GeForce RTX 4070", "start_step": 0,
                        **facts})
    return run


def test_a_run_folder_shows_predicted_beside_measured(tmp_path: Path, no_stdin: None,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    with make_run(tmp_path / "run") as run:
        for kind, held in (("step", 4 * GiB), ("eval", GiB)):
            run.append_metrics({"kind": kind, "step": 5, "memory": {"peak_allocated": held, "peak_reserved": 5 * GiB}})
    assert main(["explain", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The run fits" in printed
    assert re.search(r"First step: allocated \S+ GiB predicted, 4.00 GiB measured", printed)
    assert re.search(r"First evaluation: allocated \S+ MiB predicted, 1.00 GiB measured", printed)


def test_a_run_is_explained_by_its_recorded_plan(tmp_path: Path, no_stdin: None,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    with make_run(tmp_path / "run") as run:
        for needs in (9 * GiB, 3 * GiB):  # it was resumed
            run.append_metrics({
                "kind": "plan", "needs_bytes": needs, "reserve_limit_bytes": 8 * GiB, "peak_phase": "train",
                "phases": {"train": {"allocated_bytes": 2 * GiB, "reserved_bytes": 3 * GiB}}, "ladder": [],
                "owners_at_peak": [{"owner": "weights", "nbytes": 2 * GiB, "formula": "4 bytes a parameter"}]})
    (tmp_path / "run" / "plan.json").write_text("{}")  # nothing of the run's
    folder = str(tmp_path / "run")
    assert main(["explain", folder, "--json"]) == 0
    answer = json_output(capsys)
    assert "PyTorch needs 3.00 GiB of the 8.00 GiB available to it" in answer["title"]
    assert answer["shares"][0] == {"what": "weights", "nbytes": 2 * GiB, "note": "4 bytes a parameter"}
    for other in (["--batch_size=4"], ["--gpu=4070"]):  # what it would be, no longer what it was
        assert main(["explain", folder, "--json", *other]) == 0
        assert "3.00 GiB of the 8.00" not in json_output(capsys)["title"]


@pytest.mark.parametrize("row", [{}, {"phases": 3}, {"phases": {}, "owners_at_peak": [], "needs_bytes": 1,
                                                     "reserve_limit_bytes": 1, "peak_phase": "x"},
                                 {"phases": {"train": 1}, "owners_at_peak": None}])
def test_an_unreadable_recorded_plan_is_ignored(row: dict[str, Any]) -> None:
    plan = MemoryPlan(notes_77m("fitgpt").forecast, budget_for(CARD))
    assert recorded_plan(plan, [{"kind": "plan", **row}]) == plan


def test_a_log_in_a_run_folder_uses_its_config(tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run").close()
    found, _ = run_out(notes_77m("fitgpt", "--n_layer=2", "--batch_size=384"))
    (tmp_path / "run" / "log.txt").write_text(found.text)
    assert main(["explain", str(tmp_path / "run" / "log.txt"), "--json"]) == 0
    assert any("By its forecast this run" in note for note in json_output(capsys)["notes"])


def test_a_piped_message_uses_the_config_of_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str],
                                                         eager_message: str) -> None:
    make_run(tmp_path / "run").close()
    piped(monkeypatch, eager_message)
    assert main(["explain", str(tmp_path / "run"), "--trainer=nanogpt", "--compile=False", "--json"]) == 0
    assert json_output(capsys)["what"].startswith("16 × 1,024 × 50,304 × 4 bytes")


def test_a_run_on_the_cpu_needs_gpu_to_be_given(tmp_path: Path, no_stdin: None,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run", device="cpu", device_name="AMD EPYC").close()
    assert main(["explain", str(tmp_path / "run")]) == 2
    assert main(["explain", str(tmp_path / "run"), "--gpu=4070"]) == 0
    assert main(["explain", str(tmp_path)]) == 2  # a folder that holds no run


def test_a_plan_on_disk_is_explained(tmp_path: Path, no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHALLOW, "--gpu=4070", "--trainer=nanogpt", "--json"]) in (0, 1)
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["explain", str(tmp_path / "plan.json"), "--json"]) == 0
    answer = json_output(capsys)
    assert answer["subject"] == "plan"
    assert {"logits", "activations", "weights"} <= {share["what"] for share in answer["shares"]}


@pytest.mark.parametrize("config", [[], SHALLOW])
def test_a_plan_for_a_budget_is_explained(monkeypatch: pytest.MonkeyPatch, config: list[str],
                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fitgpt.hardware.nvidia.survey", lambda env=None: Survey(reason="no driver"))
    assert main(["plan", *SHALLOW, "--budget=11GiB", "--json"]) == 0
    piped(monkeypatch, capsys.readouterr().out)
    assert main(["explain", "-", *config, "--json"]) == 0
    assert json_output(capsys)["subject"] == "plan"


def test_an_unknown_gpu_is_a_usage_error(tmp_path: Path, no_stdin: None,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHALLOW, "--gpu=4070", "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["explain", str(tmp_path / "plan.json"), "--gpu=4o70"]) == 2


@pytest.mark.parametrize("document", [
    None, 3, [], {}, {"phases": {}}, {"phases": {"train": {"allocated_bytes": "x", "reserved_bytes": 1}}},
    {"schema": 1, "phases": None}])
def test_other_json_is_not_a_plan(document: Any) -> None:
    assert plan_from(document) is None


@pytest.mark.parametrize("wrong", ['"usable_bytes": 1' + "0" * 400, '"needs_bytes": Infinity',
                                   '"params": 1' + "0" * 30], ids=["usable", "needs", "params"])
def test_a_plan_with_impossible_figures_is_rejected(tmp_path: Path, no_stdin: None, wrong: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHALLOW, "--gpu=4070", "--json"]) == 0
    figure = wrong.partition(":")[0]
    text = re.sub(rf"{figure}: [0-9]+", wrong, capsys.readouterr().out)
    assert wrong in text
    (tmp_path / "plan.json").write_text(text)
    assert main(["explain", str(tmp_path / "plan.json")]) in (1, 2)


def test_a_plan_without_an_assumption_is_not_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHALLOW, "--gpu=4070", "--json"]) == 0
    document = json_output(capsys)
    assert plan_from(document) is not None
    for assumes in ({}, {"compile": "eager"}, {**document["assumes"], "compile": 3}):
        assert plan_from({**document, "assumes": assumes}) is None


def test_a_tight_plan_is_explained_with_its_reasons(tmp_path: Path, no_stdin: None,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    snug = ["--n_layer=4", "--compile=False", "--batch_size=118", "--gpu=4070"]
    assert main(["plan", *snug, "--json"]) == 10
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    for argv in ([str(tmp_path / "plan.json")], snug):
        assert main(["explain", *argv, "--json"]) == 0
        answer = json_output(capsys)
        assert answer["title"].startswith("The run fits, but it is tight: PyTorch needs 10.99 GiB")
        assert len([note for note in answer["notes"] if "A desktop takes 0.3 to 2 GiB" in note]) == 1


def test_a_plan_of_another_schema_is_a_usage_error_that_says_what_to_type(
        tmp_path: Path, no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHALLOW, "--gpu=4070", "--json"]) == 0
    document = json_output(capsys)
    for more, fix in (({}, "fitgpt plan --json"),
                      ({"config": notes_77m("fitgpt").resolved.to_dict()}, "fitgpt fit -o my_run.plan.json")):
        (tmp_path / "plan.json").write_text(json.dumps({**document, "schema": 1, **more}))
        assert main(["explain", str(tmp_path / "plan.json")]) == 2
        assert capsys.readouterr().err == f"fitgpt: The plan has schema 1, and this fitgpt knows 2.\n  {fix}\n"


def test_a_plan_file_is_explained_by_its_config(tmp_path: Path, no_stdin: None,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    config = notes_77m("fitgpt").resolved.to_dict()
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 2, "config": config, "gpu": "RTX 4070", "ladder": []}))
    assert main(["explain", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json_output(capsys)["subject"] == "plan"


def test_a_plan_with_a_config_lists_changes_and_savings(
        tmp_path: Path, no_stdin: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *SHALLOW, "--gpu=4070", "--saved_activations=all", "--gradient_accumulation_steps=1",
                 "-o", str(tmp_path / "plan.json")]) == 0
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "plan.json"), "--json"]) == 0
    changes = json_output(capsys)["remedies"]
    assert len(changes) == 4
    assert not any(each["effect"].endswith(" 0 B less") for each in changes)


def test_recorded_figures_override_the_plan_and_metrics() -> None:
    rows = [{"kind": "plan", "phases": {"train": {"allocated_bytes": 100 * MiB, "reserved_bytes": 120 * MiB}}},
            {"kind": "plan_measured", "phases": {"train": {"allocated_bytes": 101 * MiB, "reserved_bytes": 120 * MiB}}}]
    assert compare_phases(MemoryPlan(notes_77m("fitgpt").forecast, budget_for(CARD)), rows) == (
        "Training: allocated 100.0 MiB predicted, 101.0 MiB measured (+1.0%); reserved 120.0 MiB predicted, "
        "120.0 MiB measured (+0.0%).",)


def test_a_broken_plan_file_is_not_recognised(tmp_path: Path, no_stdin: None) -> None:
    (tmp_path / "plan.json").write_text('{"phases": ')
    assert main(["explain", str(tmp_path / "plan.json")]) == 1


def test_the_shares_of_a_plan_add_up_to_the_card() -> None:
    plan = MemoryPlan(notes_77m("fitgpt").forecast, budget_for(CARD, others=2118 * MiB))
    assert sum(share.nbytes for share in explain_plan(plan).shares) == plan.budget.usable


@pytest.mark.parametrize("row", [{}, {"kind": "step"}, {"kind": "step", "memory": 3}, {"kind": "eval", "memory": {}},
                                 {"kind": "step", "memory": {"peak_allocated": "NaN"}}, {"kind": 7}])
def test_a_record_without_figures_compares_nothing(row: dict[str, Any]) -> None:
    assert compare_phases(MemoryPlan(notes_77m("fitgpt").forecast, budget_for(CARD)), [row]) == ()


# ---- on the screen


def test_text_is_wrapped_to_the_terminal_width() -> None:
    long = Diagnosis("message", "word " * 40, what="word " * 60, shares=(MemoryShare("a", 3 * MiB, "word " * 30),),
                     needed=("word " * 30,), notes=("word " * 30,))
    for width in (40, 60, 80):
        assert max(map(len, diagnosis_text(long, width).splitlines())) <= width


def test_every_message_is_printed_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    for file in sorted(MESSAGES.glob("*.txt")):
        assert main(["explain", str(file)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= 80 or " " not in line.strip()  # a path of the traceback stays whole
                   or "NVIDIA Control Panel" in line for line in lines)


def test_explain_loads_neither_torch_nor_numpy() -> None:
    script = ("import sys\nfrom fitgpt.commands.main import main\n"
              f"code = main(['explain', {str(MESSAGES / 'nanogpt-88.txt')!r}, *{SHALLOW!r}])\n"
              "assert code == 0 and not {'torch', 'numpy', 'rich'} & set(sys.modules)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr


def test_the_documented_message_equals_the_simulated_one() -> None:
    message = run_out(notes_77m("nanogpt", "--compile=False"), others_mib=2118)[0].text
    assert (ROOT / "docs" / "examples" / "oom_77m.txt").read_text(encoding="utf-8") == message + "\n"
    thread = (MESSAGES / "residualmasking-15.txt").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "examples" / "oom_neighbour.txt").read_text(encoding="utf-8") == thread


def test_docs_have_a_section_for_every_rule() -> None:
    page = (ROOT / "docs" / "explain.md").read_text(encoding="utf-8")
    assert [line.split()[1] for line in page.splitlines() if line.startswith(("### OOM-", "### RANKS-"))] == [
        rule.code for rule in RULES]


def test_an_unreadable_config_is_a_usage_error(no_stdin: None,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(MESSAGES / "nanogpt-88.txt"), "no_such_config.py"]) == 2
    assert main(["explain", str(MESSAGES / "nanogpt-88.txt"), "--no_such_knob=1"]) == 2
    assert RunConfig().vocab_size == 0


def test_a_process_larger_than_the_reading_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--reading=6582MiB", "--process=9000MiB"]) == 2
    assert "more than --reading" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["/dev/zero", "-"])
def test_a_device_that_never_ends_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                                   target: str) -> None:
    with open("/dev/zero", encoding="latin1") as zero:
        monkeypatch.setattr(sys, "stdin", zero)
        assert main(["explain", target]) == 2
    assert "is a device" in capsys.readouterr().err
