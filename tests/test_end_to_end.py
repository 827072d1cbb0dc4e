"""As a user would type it: texts, tokens, a trained model, its loss, its words, and the same model in transformers."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import string
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fitgpt
from fitgpt import GPTConfig
from fitgpt.commands.main import main
from fitgpt.config.architectures import parameter_shapes
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import DataError, UsageError
from fitgpt.data.dataset import open_dataset
from fitgpt.data.sample_order import positions_for
from fitgpt.engine import device
from fitgpt.engine.model import GPT, build_model
from fitgpt.engine.ops import Pointwise
from fitgpt.engine.weights import fill
from fitgpt.runs.metrics import read_metrics
from fitgpt.runs.record import read_run
from fitgpt.training import checkpoint, supervisor
from fitgpt.training.loop import learning_rate_at
from fitgpt.training.run import run
from fitgpt.training.trained_model import from_run
from tests.helpers import reference_loss

pytestmark = pytest.mark.xdist_group("end to end")  # one process trains the runs that these tests share

SMALL: dict[str, Any] = dict(
    n_layer=2, n_head=2, n_embd=32, block_size=32, batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
    min_lr=1e-3, warmup_iters=2, max_iters=8, lr_decay_iters=8, eval_interval=8, eval_iters=3, device="cpu")


def flags(**options: Any) -> list[str]:
    return [f"--{key}={value}" for key, value in options.items()]


@contextmanager
def inside(folder: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


def work_here(given: supervisor.WorkerConfig) -> tuple[int, dict[str, Any]]:
    """In the place of supervisor.run_worker: without the seconds in which a new process imports torch."""
    run(given.config, given.notes, lambda: False, others=given.others)
    return 0, {}


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "run_worker", work_here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to work in, with data/mine made from texts, and two trained runs: runs/plain and runs/biased."""
    with inside(tmp_path_factory.mktemp("folder")) as folder:
        (folder / "texts").mkdir()
        for number in range(40):
            text = " ".join(f"the {animal} says so" for animal in random.Random(number).choices("abcdef", k=20))
            (folder / "texts" / f"{number}.txt").write_text(f"Nº {number}: {text}\n", encoding="utf-8")
        assert main(["prepare", "texts", "--name=mine", "--tokenizer=bytes", "--val_fraction=0.2",
                     "--processes=1"]) == 0
        assert main(["train", *flags(**SMALL, dataset="mine", out_dir="runs/plain", bias=False)]) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(supervisor, "run_worker", work_here)
            assert main(["train", *flags(**SMALL, dataset="mine", out_dir="runs/biased", bias=True)]) == 0
        yield folder


@pytest.fixture(autouse=True)
def in_the_folder(folder: Path) -> Iterator[None]:
    with inside(folder):
        yield


# ---- texts → tokens → a model


def test_every_byte_is_a_token_and_every_text_ends_with_end_of_text(folder: Path) -> None:
    texts = [file.read_bytes() for file in (folder / "texts").iterdir()]
    summary = open_dataset("mine").summary
    assert (summary.tokenizer, summary.vocab_size) == ("bytes", 257)
    assert summary.train_tokens + summary.val_tokens == sum(map(len, texts)) + len(texts)
    assert summary.val_tokens > 500


def test_training_lowers_the_loss_and_writes_metrics(folder: Path) -> None:
    rows = read_metrics(folder / "runs/plain/metrics.jsonl")
    losses = [row["loss"] for row in rows if row["kind"] == "step"]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(from_run(folder / "runs/plain").gpt.vocab_size), abs=0.3)
    assert losses[-1] < losses[0] - 1


def test_train_and_load_are_library_functions(folder: Path) -> None:
    assert fitgpt.train(SMALL, dataset="mine", out_dir="runs/library", max_iters=1) == Path("runs/library")
    assert isinstance(fitgpt.load("runs/library", device="cpu").model, GPT)
    with pytest.raises(UsageError, match="'batchsize' is not an option"):
        fitgpt.train(batchsize=8)
    with pytest.raises(UsageError, match="takes a config file, a dict of options or a RunConfig, and this is 8"):
        fitgpt.train(8)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="nowhere"):
        fitgpt.train(dataset="nowhere")


def test_eval_measures_what_training_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/plain", "--json", "--device=cpu"]) == 0
    measured = json.loads(capsys.readouterr().out)
    recorded = [row for row in read_metrics(folder / "runs/plain/metrics.jsonl") if row["kind"] == "eval"][-1]
    assert measured["step"] == 8
    assert [loss["split"] for loss in measured["losses"]] == ["train", "val"]
    for ours, theirs in zip(measured["losses"], recorded["losses"], strict=True):
        assert {**ours, "mean": 0, "stderr": 0} == {**theirs, "mean": 0, "stderr": 0}
        assert (ours["mean"], ours["stderr"]) == pytest.approx((theirs["mean"], theirs["stderr"]), rel=1e-6)


def test_eval_without_json_is_one_line_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/plain", "--split=val", "--eval_iters=1", "--device=cpu"]) == 0
    assert re.fullmatch(r"step 8: val loss \d\.\d+ \(± .*, block 32, .*\)\n", capsys.readouterr().out)


# ---- words


def test_sample_takes_nanogpts_flags_and_a_prompt_from_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prompt.txt").write_text("Nº 7: the", encoding="utf-8")
    command = ["sample", "--out_dir=runs/plain", "--start=FILE:prompt.txt", "--num_samples=2", "--max_new_tokens=40",
               "--device=cpu", "--seed=5"]
    assert main(command) == 0
    first = capsys.readouterr().out
    samples = first.split("\n---------------\n")
    assert len(samples) == 3
    assert samples[2] == ""
    assert all(sample.startswith("Nº 7: the") and len(sample) > 20 for sample in samples[:2])
    assert samples[0] != samples[1]
    assert main(command) == 0
    assert capsys.readouterr().out == first  # the same seed, the same words
    kept = read_run("runs/plain").samples
    assert [each.text for each in kept[-4:]] == samples[:2] * 2
    assert kept[-1].step > 0


@pytest.mark.parametrize("command", [["eval", "runs/plain", "--eval_iters=1"],
                                     ["sample", "runs/plain", "--num_samples=1", "--max_new_tokens=9"]])
def test_a_failing_compiler_leaves_eval_and_sample_eager(
        command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["c++"])

    def compile_model(model: GPT) -> None:
        model.ops, model._block_next = Pointwise(*[fails] * len(Pointwise._fields)), fails

    monkeypatch.setattr(GPT, "compile", compile_model)
    monkeypatch.setattr(device, "_compile", lambda requested, *_: (requested, ""))  # whether there is a compiler or not
    assert main([*command, "--device=cpu"]) == 0
    eager = capsys.readouterr().out
    assert main([*command, "--device=cpu", "--compile"]) == 0
    compiled = capsys.readouterr()
    assert re.sub(r"[\d.,k]+ tokens/s", "", compiled.out) == re.sub(r"[\d.,k]+ tokens/s", "", eager)
    assert "compile: False, because torch.compile failed: Command '['c++']' returned" in compiled.err


def test_a_prompt_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "runs/plain", "--start=FILE:nowhere.txt", "--device=cpu"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_an_error(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of another's does not say that its tokens are bytes, and GPT-2's do not fit into its 320 rows."""
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: None)  # its files may not be here, nor are they needed
    assert main(["export", "runs/plain", "-o", "silent"]) == 0
    config = json.loads(Path("silent/config.json").read_text())
    Path("silent/config.json").write_text(json.dumps({key: config[key] for key in config if "fitgpt" not in key}))
    assert main(["sample", "--init_from=silent", "--start=hello", "--num_samples=1", "--device=cpu"]) == 3
    assert "has a vocabulary of 320, not GPT-2's 50,257" in capsys.readouterr().err


def test_an_export_samples_the_same_text_as_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/plain", "-o", "telling"]) == 0
    capsys.readouterr()
    said = []
    for place in ("runs/plain", "telling"):
        assert main(["sample", place, "--start=é", "--num_samples=1", "--max_new_tokens=20", "--device=cpu"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_an_export_without_gpt2s_vocabulary_is_written_with_a_warning(
        folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_network(name: str) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("tiktoken.get_encoding", no_network)
    assert main(["export", "runs/plain", "-o", "first"]) == 0
    for file in ("tokenizer.json", "tokenizer_config.json"):
        Path("first", file).unlink()
    config = Path("first/config.json")
    config.write_text(config.read_text().replace('"bytes"', '"gpt2"'))
    capsys.readouterr()
    assert main(["export", "first", "-o", "again"]) == 0
    assert "the tokenizer is not in the export: tiktoken could not load" in capsys.readouterr().err
    assert not Path("again/tokenizer.json").exists()


# ---- the same model elsewhere


def our_logits(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """[T, V]: the engine gives only the last position's, so every prefix is asked for."""
    return torch.stack([model.next_logits(tokens[None, :end], model.new_cache(batch=1))[0]
                        for end in range(1, len(tokens) + 1)])


@pytest.mark.parametrize("name", ["plain", "biased"])
@torch.no_grad()
def test_an_export_has_the_same_logits_in_transformers(folder: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert main(["export", f"runs/{name}", "-o", f"hf-{name}", "--which=last"]) == 0
    theirs = transformers.GPT2LMHeadModel.from_pretrained(f"hf-{name}").eval()
    source = from_run(folder / "runs" / name)
    ours = build_model(source.gpt, torch.device("cpu"), seed=0).eval()
    fill(ours, source.weights, source.place)
    tokens = torch.from_numpy(open_dataset("mine").split("val").read_fixed(np.arange(1), 31, 1)[0].astype(np.int64))
    expected = our_logits(ours, tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(theirs(tokens[None]).logits[0], expected, atol=1e-4, rtol=0)


def test_training_starts_from_a_folder_of_transformers(folder: Path, in_this_process: None) -> None:
    """Cropped to a shorter block, as nanoGPT does; the loss before the first step is transformers' own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=257, activation_function="gelu",
        initializer_range=0.2, bos_token_id=None, eos_token_id=None)).eval()
    theirs.save_pretrained("their-gpt")
    assert main(["train", *flags(**{**SMALL, "max_iters": 1}, dataset="mine", out_dir="runs/from-hf",
                                 init_from="their-gpt")]) == 0
    evaluation = next(row for row in read_metrics(folder / "runs/from-hf/metrics.jsonl") if row["kind"] == "eval")
    windows = open_dataset("mine").split("val").read_fixed(np.arange(12), 32, RunConfig.seed).astype(np.int64)
    tokens = torch.from_numpy(windows)
    with torch.no_grad():
        logits = theirs(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert expected > 5.6  # no fresh weights would be that wrong
    assert evaluation["losses"][1]["mean"] == pytest.approx(expected, rel=1e-4)
    assert from_run(folder / "runs/from-hf").gpt.block_size == 32


def test_a_new_run_starts_from_the_weights_of_another(folder: Path, in_this_process: None) -> None:
    """With its shape, and its loss before the first step."""
    assert main(["train", *flags(**{**SMALL, "max_iters": 1, "n_layer": 3}, dataset="mine", out_dir="runs/second",
                                 init_from="runs/plain")]) == 0
    first, second = ([row for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if row["kind"] == "eval"]
                     for name in ("plain", "second"))
    assert second[0]["step"] == 0
    assert second[0]["losses"][1]["mean"] == pytest.approx(first[-1]["losses"][1]["mean"], rel=1e-5)
    assert from_run(folder / "runs/second").gpt == from_run(folder / "runs/plain").gpt


@pytest.mark.parametrize("verb", ["train", "sample"])
def test_missing_gpt2_weights_name_the_command_that_fetches_them(
        verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "empty"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    more = flags(dataset="mine", out_dir="runs/none") if verb == "train" else []
    assert main([verb, "--init_from=gpt2", "--device=cpu", *more]) == 3
    error = capfd.readouterr().err
    assert "hf download openai-community/gpt2 " in error
    assert "Traceback" not in error


# ---- coming from nanoGPT

CHARACTERS = sorted(set(string.ascii_lowercase + " \n"))
STEP = 5


@pytest.fixture(scope="module")
def nanogpt(folder: Path) -> tuple[GPT, torch.optim.AdamW]:
    """data/letters as nanoGPT's prepare.py writes it, and out/ckpt.pt as its train.py does, compiled, at step 5."""
    (folder / "data" / "letters").mkdir(parents=True)
    generator = np.random.default_rng(1)
    for split, count in (("train", 4000), ("val", 800)):
        tokens = generator.integers(0, len(CHARACTERS), count).astype(np.uint16)
        tokens.tofile(folder / "data" / "letters" / f"{split}.bin")
    meta = {"vocab_size": len(CHARACTERS), "itos": dict(enumerate(CHARACTERS)),
            "stoi": {character: number for number, character in enumerate(CHARACTERS)}}
    (folder / "data" / "letters" / "meta.pkl").write_bytes(pickle.dumps(meta))

    gpt = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=len(CHARACTERS), bias=False)
    model = build_model(gpt, torch.device("cpu"), seed=3)
    named = dict(model.named_parameters())
    order = list(parameter_shapes(gpt))  # nanoGPT numbers first the matrices, then the vectors
    groups = [[named[name] for name in order if named[name].dim() >= 2],
              [named[name] for name in order if named[name].dim() < 2]]
    optimizer = torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1},
                                   {"params": groups[1], "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95))
    torch.manual_seed(4)
    for _ in range(STEP):
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter) * 0.1
        optimizer.step()
    optimizer.zero_grad()
    state = {name: named[name].detach().clone() for name in order}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    (folder / "out").mkdir()
    torch.save({
        "model": {f"_orig_mod.{name}": tensor for name, tensor in state.items()},
        "optimizer": optimizer.state_dict(),
        "model_args": dict(n_layer=2, n_head=2, n_embd=32, block_size=32, bias=False, vocab_size=len(CHARACTERS),
                           dropout=0.0),
        "iter_num": STEP, "best_val_loss": torch.tensor(2.5),
        "config": {**SMALL, "dataset": "letters", "out_dir": "out", "init_from": "scratch", "device": "cuda"},
    }, folder / "out" / "ckpt.pt")
    return model, optimizer


def test_a_nanogpt_checkpoint_can_be_sampled(nanogpt: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "--out_dir=out", "--start=a b", "--num_samples=1", "--max_new_tokens=30",
                 "--device=cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a b")
    assert set(out.partition("\n---------------")[0]) <= set(CHARACTERS)


def test_a_character_run_samples_without_its_dataset_and_a_ckpt_pt_needs_it(
        folder: Path, nanogpt: object, in_this_process: None, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *flags(**{**SMALL, "max_iters": 1}, dataset="letters", out_dir="runs/letters")]) == 0
    (folder / "elsewhere").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / "elsewhere")
    capsys.readouterr()
    say = ["--start=a b", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"]
    assert main(["sample", "../runs/letters", *say]) == 0
    assert capsys.readouterr().out.startswith("a b")
    assert main(["sample", "../out/ckpt.pt", *say]) == 3
    assert "where data/letters is" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["out", "out/ckpt.pt"])
def test_a_new_run_starts_from_nanogpts_weights(folder: Path, nanogpt: tuple[GPT, object], in_this_process: None,
                                                place: str) -> None:
    out_dir = f"runs/from-{place.replace('/', '-')}"
    barely = {**SMALL, "max_iters": 1, "learning_rate": 1e-12, "min_lr": 1e-12}
    assert main(["train", *flags(**barely, dataset="letters", out_dir=out_dir, init_from=place)]) == 0
    started = checkpoint.load(folder / out_dir / "checkpoints", "last")
    assert started.state["step"] == 1
    for name, parameter in nanogpt[0].named_parameters():
        torch.testing.assert_close(started.model[name], parameter.detach())


def test_eval_of_a_config_file_names_the_command_that_evaluates_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "config/eval_gpt2.py"]) == 4
    assert "fitgpt train config/eval_gpt2.py --eval_only" in capsys.readouterr().err


def test_resuming_a_nanogpt_checkpoint_without_its_flags_names_them(
        nanogpt: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "--out_dir=out", "--device=cpu"]) == 3
    assert "that it was trained with, and --resume --out_dir=out" in capsys.readouterr().err


def test_a_nanogpt_checkpoint_is_trained_further_with_its_own_optimizer_state(
        folder: Path, nanogpt: tuple[GPT, torch.optim.AdamW], capfd: pytest.CaptureFixture[str]) -> None:
    """One step of ours against one step of torch's own AdamW, which continues from the state in the file."""
    config = RunConfig(**{**SMALL, "dataset": "letters", "out_dir": "out", "max_iters": STEP + 1, "beta2": 0.95})
    assert main(["train", *flags(**config.to_dict() | {"init_from": "resume"})]) == 0
    assert f"from step {STEP} to {STEP + 1}" in capfd.readouterr().out

    model, optimizer = nanogpt
    split = open_dataset("letters").split("train")
    for micro in range(2):
        samples = positions_for(STEP, micro, batch_size=4, accumulation=2)
        tokens = torch.from_numpy(split.read(samples, 32, config.seed).astype(np.int64))
        (reference_loss(model, tokens[:, :-1], tokens[:, 1:]) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(STEP, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step()

    ours = checkpoint.load(folder / "out" / "checkpoints", "last")
    assert ours.state["step"] == STEP + 1
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name])
        torch.testing.assert_close(ours.model[name], parameter.detach(), atol=1e-6, rtol=1e-5)
