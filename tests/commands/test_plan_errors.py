"""`fitgpt plan`: errors and their messages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import fitgpt
from fitgpt.core.errors import DataError, UsageError
from fitgpt.data.shards import check_vocab
from tests.plan_command import SMALL, write_chars


@pytest.mark.parametrize(("argv", "message"), [
    (["--gpu=nonsense"], "'nonsense' is not a GPU"),
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
    (["--gpu=t4", "--trainer=nanogpt", "--dtype=bfloat16", "--hours=8"], "no speed estimate for this GPU"),
    (["--gpu=4070", "--trainer=karpathy"], "one of fitgpt, nanogpt"),
    (["--gpu=4070", "--torch=new"], "a version such as 2.11"),
    (["--gpu=4070", "--dropout=0.1", "--cuda_graphs=True"], "cuda_graphs=True does not work with dropout=0.1"),
    (["--gpu=4070", "--all-cards"], "--all-cards"),
    (["--gpu=4070", "--n_embd=513"], "not a multiple"),
    (["--gpu=4070", "--batchsize=3"], "--batchsize is not an option"),
    (["--gpu=t4", "--dtype=bfloat16"], "compute capability 8.0"),
    (["--gpu=4070", "nowhere.py"], "There is no config file"),
    (["--gpu=4070", "odd.py"], "batch_sise"),
    (["--device=cpu"], "device=cpu"),
])
def test_mistakes_give_a_message_and_a_fix(run_plan: Any, tmp_path: Path, argv: list[str],
                                           message: str) -> None:
    (tmp_path / "odd.py").write_text("batch_sise = 8\n")
    (tmp_path / "empty").mkdir()
    answer = run_plan(*argv)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    what, fix = answer.err.splitlines()
    assert what.startswith("fitgpt: ")
    for typed in re.split(", or | or ", fix.strip()):
        if typed.startswith("fitgpt "):
            command, *rest = shlex.split(typed)[1:]
            (tmp_path / "odd.py").write_text("batch_size = 8\n")
            assert run_plan(*rest, "--gpu=4070", command=command).code == 0, typed
        elif typed.startswith("--"):  # after the flags that were typed, or in place of those that the message names
            named = {*re.findall(r"[\w-]+", what.replace("--", "")), *re.findall(r"--([\w-]+)", typed)}
            kept = [flag for flag in argv if flag.removeprefix("--").partition("=")[0] not in named]
            assert {run_plan(*before, *shlex.split(typed)).code for before in (argv, kept)} & {0, 1}, typed
        else:  # in the config file
            (tmp_path / "odd.py").write_text(f"{typed}\n")
            assert run_plan(*argv).code == 0, typed


def test_a_vocabulary_that_differs_from_the_data_gives_the_error_of_train(run_plan: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=1000)
    with pytest.raises(DataError) as of_train:
        check_vocab(None, 50, 65)
    wrong = [*SMALL, "--dataset=letters", "--vocab_size=50"]
    for command in ("plan", "fit"):
        answer = run_plan(*wrong, "--gpu=4070", command=command)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err == f"fitgpt: {of_train.value.what}\n  {of_train.value.fix}\n"
    with pytest.raises(UsageError, match="do not agree"):
        fitgpt.plan({"dataset": "letters", "vocab_size": 50}, gpu="4070")
    assert run_plan(*SMALL, "--dataset=letters", "--init_from=gpt2", "--gpu=4070").code == 2
    assert run_plan(*wrong, "--trainer=nanogpt", "--gpu=4070").code == 0  # which does not look


def test_a_checkpoint_that_only_train_can_read_passes_the_vocabulary_check(run_plan: Any, tmp_path: Path) -> None:
    write_chars(tmp_path / "data" / "letters", train=1000)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "ckpt.pt").write_bytes(b"")
    assert run_plan(*SMALL, "--dataset=letters", "--vocab_size=50", "--init_from=theirs", "--gpu=4070").code == 0


def test_a_page_that_cannot_be_written_is_an_error_before_planning(run_plan: Any) -> None:
    answer = run_plan(*SMALL, "--gpu=4070", "--timeline=no/such/folder/x.html")
    assert (answer.code, answer.out) == (2, "")
    assert "--timeline no/such/folder/x.html: there is no folder no/such/folder." in answer.err
