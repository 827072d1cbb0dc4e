"""What a report says about a run: verdict, figures, the command that trains it again, the CSV."""

from __future__ import annotations

import csv
import shlex
from dataclasses import replace
from typing import Any

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.run_config import RunConfig, config_from
from fitgpt.core.units import GiB
from fitgpt.runs.record import RunRecord, record_of
from fitgpt.show.report_summary import readings, reproduce, to_csv, verdict
from fitgpt.show.terminal import command_lines
from tests.report_rows import FACTS, PLAN, evaluation, page_of, step


def record(*rows: dict[str, Any], **facts: Any) -> RunRecord:
    return record_of("x", [FACTS | facts, *rows], None)


ON_CPU = {"memory": {}}


@pytest.mark.parametrize(("rows", "sentences"), [
    ([step(99, **ON_CPU), evaluation(0, 4.0), evaluation(50, 3.0), evaluation(100, 2.9)],
     "Finished: all 100 steps. Best validation loss 2.9000 at step 100, the last evaluation: it was still falling "
     "(-0.1000 since the one before)."),
    ([step(49, **ON_CPU), evaluation(0, 3.0), evaluation(50, 2.999)],
     "Not finished: 50 of 100 steps. Best validation loss 2.9990 at step 50, the last evaluation: it was nearly flat "
     "(-0.0010 since the one before)."),
    ([step(49, **ON_CPU), evaluation(0, 3.0), evaluation(20, 2.0), evaluation(30, 2.1), evaluation(40, 2.2)],
     "Not finished: 50 of 100 steps. Best validation loss 2.0000 at step 20; it has not improved in the 2 evaluations "
     "since."),
    ([step(0, **ON_CPU)], "Not finished: 1 of 100 steps. No validation loss yet."),
    ([PLAN, step(99)],
     "Finished: all 100 steps. No validation loss yet. Peak memory 4.00 GiB reserved, 1.00 GiB under the plan of "
     "5.00 GiB."),
])
def test_the_verdict_is_progress_best_loss_and_memory_in_words(rows: list[dict[str, Any]], sentences: str) -> None:
    assert verdict(record(*rows)) == sentences
    assert sentences in page_of([FACTS, *rows])


def test_a_training_loss_that_falls_while_validation_rises_is_overfitting() -> None:
    rows = [evaluation(0, 3.0), evaluation(50, 3.5)]
    rows[1]["losses"][0]["mean"] = 1.0
    assert "while the training loss fell: the model overfits." in verdict(record(*rows))


def test_a_run_that_is_training_now_is_not_called_unfinished() -> None:
    assert verdict(replace(record(step(0)), running=True)).startswith("Running: 1 of 100 steps.")


def test_perplexity_is_the_exponential_of_the_best_loss_and_bytes_have_bits_per_byte() -> None:
    rows = [evaluation(0, 3.0), evaluation(50, 2.0)]
    assert readings(record(*rows))["perplexity"] == ("7.389", "per token")
    assert readings(record(*rows, tokenizer="bytes"))["perplexity"] == ("7.389", "2.8854 bits per byte")


def test_a_run_on_a_cpu_has_no_memory_figures_and_no_empty_box() -> None:
    rows = [step(n, **ON_CPU) for n in range(3)]
    assert "peak memory" not in readings(record(*rows))
    assert "memory" not in page_of([FACTS, *rows]).partition("<body>")[2].partition("<script>")[0].lower()
    assert readings(record(PLAN, step(0)))["peak memory"] == ("4.00 GiB", "reserved; planned 5.00 GiB")


def test_the_command_trains_the_same_config_in_another_folder() -> None:
    config = RunConfig(n_layer=3, n_head=3, n_embd=96, learning_rate=1e-3, min_lr=1e-3 / 10, dataset="my data",
                       out_dir="runs/x", init_from="resume", compile=False, saved_activations="2*all,1*input")
    words = reproduce(record_of("x", [FACTS], config.to_dict()))
    typed = "\n".join(command_lines(words, 60)).replace("\\\n", "")  # as a shell joins the lines
    argv = shlex.split(typed)
    assert argv[:2] == ["fitgpt", "train"]
    again, _ = config_from(walk(argv[2:], RunConfig))
    assert again == replace(config, out_dir="runs/x-again", init_from="scratch")


def test_the_csv_has_a_row_per_step_and_evaluation() -> None:
    rows = list(csv.DictReader(to_csv([record(step(0), step(10, loss=2.5), evaluation(11, 2.4))]).splitlines()))
    assert [(row["step"], row["loss"], row["evaluated_val_loss"]) for row in rows] == [
        ("0", "3", ""), ("10", "2.5", ""), ("11", "", "2.4")]
    assert rows[1]["tokens"] == "10000"
    assert float(rows[1]["hours"]) == pytest.approx(10 * 0.5 / 3600, rel=1e-4)
    assert rows[1]["peak_reserved_bytes"] == str(4 * GiB)
