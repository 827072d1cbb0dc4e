"""RunConfig: nanoGPT's names and defaults, every relation between knobs, and what may change on a resume."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.fields import knobs_of, walk
from fitgpt.config.run_config import (
    FROZEN_ON_RESUME,
    TOGETHER_ON_RESUME,
    RunConfig,
    check_resume,
    diff,
    gpt2_shapes,
    resolve,
)
from fitgpt.core.errors import CheckpointError, UsageError

NANOGPT = dict(
    out_dir="out", eval_interval=2000, log_interval=1, eval_iters=200, eval_only=False, always_save_checkpoint=True,
    init_from="scratch", wandb_log=False, wandb_project="owt", wandb_run_name="gpt2", dataset="openwebtext",
    gradient_accumulation_steps=40, batch_size=12, block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.0,
    bias=False, learning_rate=6e-4, max_iters=600000, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
    decay_lr=True, warmup_iters=2000, lr_decay_iters=600000, min_lr=6e-5, backend="nccl")


def config(*argv: str, base: dict[str, Any] | None = None) -> RunConfig:
    return resolve(walk(argv, RunConfig), base)[0]


def notes(*argv: str) -> list[str]:
    return resolve(walk(argv, RunConfig))[1]


def refusal(*argv: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        config(*argv)
    return caught.value


def test_the_defaults_are_nanogpts() -> None:
    ours = RunConfig().to_dict()
    assert {key: ours[key] for key in NANOGPT} == NANOGPT
    assert (ours["device"], ours["dtype"], ours["compile"]) == ("auto", "auto", "auto")


def test_a_config_cannot_be_changed_once_made() -> None:
    with pytest.raises(AttributeError):
        RunConfig().n_layer = 3  # type: ignore[misc]


def test_nanogpts_example_command_is_understood(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("dropout = 0.2\nbatch_size = 64\nlr_decay_iters = 5000\nwarmup_iters = 100\n")
    got = config(
        str(tmp_path / "c.py"), "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1",
        "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000",
        "--lr_decay_iters=2000", "--dropout=0.0")
    assert (got.device, got.compile, got.dropout, got.batch_size) == ("cpu", False, 0.0, 12)


@pytest.mark.parametrize("flag", [
    "--learning_rate=nan", "--learning_rate=inf", "--learning_rate=-1", "--learning_rate=0", "--n_layer=0",
    "--block_size=0", "--batch_size=0", "--gradient_accumulation_steps=0", "--n_head=0", "--n_embd=0", "--dropout=1",
    "--dropout=-0.1", "--beta1=1", "--beta2=1.0", "--beta2=-0.5", "--weight_decay=-1", "--grad_clip=-1", "--min_lr=-1",
    "--warmup_iters=-1", "--lr_decay_iters=0", "--max_iters=-1", "--eval_interval=0", "--eval_iters=0",
    "--log_interval=0", "--keep_last=0", "--keep_last=1", "--keep_last=-1", "--vocab_size=-1", "--seed=-1",
    "--save_interval=-1", "--max_skipped_steps=0", "--loss_chunk=-1", "--eval_batch_size=-1", "--eval_block_size=-1",
    "--n_layer=1e9", "--batch_size=1e12", "--device=gpu", "--device=cuda:", "--device=cuda:-1", "--device=cuda:x",
    "--device=", "--dtype=half", "--dtype=fp16", "--compile=maybe", "--backend=mpi", "--out_dir=", "--out_dir=a\nb",
    "--out_dir=" + "x" * 300, "--dataset=", "--bias=2", "--init_from=",
])
def test_a_value_outside_its_rule_is_refused_by_name(flag: str) -> None:
    assert refusal(flag).what.startswith(f"{flag}: {flag[2:].partition('=')[0]} ")


def test_fewer_than_two_checkpoints_are_refused_with_the_reason() -> None:
    assert "one must survive" in refusal("--keep_last=1").what


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "mps"])
def test_devices_go_by_torchs_names(device: str) -> None:
    assert config(f"--device={device}").device == device


@pytest.mark.parametrize(("width", "heads", "head_counts", "widths", "fixes"), [
    (512, 12, "8 or 16", "504 or 516", ["--n_head=8", "--n_head=16", "--n_embd=480", "--n_embd=576"]),
    (768, 11, "8 or 12", "759 or 770", ["--n_head=12", "--n_embd=792"]),
    (8, 12, "1", "12", ["--n_head=1", "--n_embd=12"]),
    (7, 3, "1 or 7", "6 or 9", ["--n_head=7", "--n_embd=24"]),
    (1600, 24, "20 or 25", "1584 or 1608", ["--n_embd=1536"]),
])
def test_a_width_its_heads_cannot_share_is_answered_with_the_nearest_that_work(
        width: int, heads: int, head_counts: str, widths: str, fixes: list[str]) -> None:
    error = refusal(f"--n_embd={width}", f"--n_head={heads}")
    assert f"n_embd={width} is not a multiple of n_head={heads}" in error.what
    assert f"width {width}: {head_counts}." in error.what
    assert f"{heads} heads: {widths}" in error.what
    assert all(fix in error.fix.split() for fix in fixes)


@pytest.mark.parametrize(("width", "heads"), [
    (width, heads) for width in (8, 64, 100, 512, 514, 769, 1023) for heads in (3, 5, 7, 11, 12, 13, 100)
    if width % heads])
def test_every_shape_offered_works(width: int, heads: int) -> None:
    for flag in refusal(f"--n_embd={width}", f"--n_head={heads}").fix.split(" or "):
        config(f"--n_embd={width}", f"--n_head={heads}", flag)


def test_evaluation_cannot_see_further_than_the_model() -> None:
    assert "larger than block_size=64" in refusal("--block_size=64", "--eval_block_size=65").what
    assert config("--block_size=64", "--eval_block_size=64").eval_block == 64


@pytest.mark.parametrize(("flags", "says"), [
    (["--learning_rate=3e-5"], "min_lr=6e-05 is above learning_rate=3e-05"),
    (["--lr_decay_iters=1000"], "warmup_iters=2000 is above lr_decay_iters=1000")])
def test_a_learning_rate_rarely_meant_is_taken_as_nanogpt_takes_it_and_said(flags: list[str], says: str) -> None:
    _, notes = resolve(walk(flags, RunConfig))
    assert [says in note for note in notes] == [True]
    assert resolve(walk([*flags, "--decay_lr=False"], RunConfig))[1] == []
    assert resolve([])[1] == []


def test_a_run_may_be_shorter_than_its_warm_up() -> None:
    assert config("--max_iters=20").warmup_iters == 2000


def test_zero_means_the_training_value_in_evaluation() -> None:
    got = config("--batch_size=16", "--block_size=512")
    assert (got.eval_batch, got.eval_block) == (16, 512)
    got = config("--batch_size=16", "--eval_batch_size=4", "--eval_block_size=256")
    assert (got.eval_batch, got.eval_block) == (4, 256)


def test_the_shape_takes_gpt2s_vocabulary_unless_told() -> None:
    assert RunConfig().gpt_config().vocab_size == 50304
    shape = RunConfig(vocab_size=100, n_layer=3, grad_checkpoint=True, dropout=0.1).gpt_config()
    assert (shape.vocab_size, shape.n_layer, shape.grad_checkpoint, shape.dropout) == (100, 3, True, 0.1)
    assert shape.bias is False
    assert RunConfig().tokens_per_step == 491_520


# ---- init_from


@pytest.mark.parametrize("model", gpt2_shapes)
def test_a_gpt2_has_its_own_shape_bias_and_vocabulary(model: str) -> None:
    got = config(f"--init_from={model}")
    assert {key: getattr(got, key) for key in gpt2_shapes[model]} == gpt2_shapes[model]
    assert (got.bias, got.vocab_size, got.dropout) == (True, 50257, 0.0)


def test_a_gpt2s_shape_wins_over_flags_and_says_so() -> None:
    argv = ("--n_layer=3", "--bias=True", "--init_from=gpt2", "--vocab_size=50304")
    assert config(*argv).n_layer == 12
    assert notes(*argv) == ["--n_layer=3: n_layer is 12 here, not 3, because init_from=gpt2.",
                            "--vocab_size=50304: vocab_size is 50257 here, not 50304, because init_from=gpt2."]
    assert notes("--init_from=gpt2", "--n_layer=12") == []
    assert notes("--n_layer=3") == []


def test_a_gpt2_keeps_to_the_positions_it_has_learned() -> None:
    assert "1024 positions" in refusal("--init_from=gpt2", "--block_size=2048").what
    assert config("--init_from=gpt2", "--block_size=512").block_size == 512


def test_weights_may_come_from_a_folder_and_from_nowhere_else(tmp_path: Path) -> None:
    assert config(f"--init_from={tmp_path}").init_from == str(tmp_path)
    assert "gpt2-medium" in refusal("--init_from=gpt2-medum").fix
    assert "no such folder" in refusal(f"--init_from={tmp_path}/missing").what
    (tmp_path / "file").touch()
    assert "no such folder" in refusal(f"--init_from={tmp_path}/file").what


def test_resume_is_short_for_init_from_resume() -> None:
    assert config("--resume").init_from == "resume"
    assert "takes no value" in refusal("--resume=out").what


def test_resume_followed_by_another_start_is_a_contradiction(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("init_from = 'gpt2'")
    error = refusal("--resume", str(file))
    assert f"{file}:1 says init_from=gpt2" in error.what
    assert config(str(file), "--resume").init_from == "resume"


# ---- records and resumes


def test_a_config_survives_json() -> None:
    one = RunConfig(compile=False, learning_rate=1e-3, out_dir="日本")
    assert RunConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_nanogpts_recorded_config_is_understood() -> None:
    assert RunConfig.from_dict({**NANOGPT, "device": "cuda", "dtype": "bfloat16", "compile": True}).device == "cuda"


def test_a_record_of_a_newer_version_names_what_is_new() -> None:
    with pytest.raises(CheckpointError, match="rope, zeta, which this version"):
        RunConfig.from_dict({"zeta": 1, "rope": 2, "n_layer": 3})


@pytest.mark.parametrize("record", [
    {"learning_rate": float("nan")}, {"n_layer": "12"}, {"n_layer": None}, {"n_head": 5}])
def test_a_broken_record_is_the_checkpoints_fault(record: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="recorded config"):
        RunConfig.from_dict(record)
    with pytest.raises(CheckpointError, match="recorded config"):
        resolve([], record)


def test_a_resumed_run_has_its_recorded_config_but_for_what_is_said() -> None:
    base = RunConfig(n_layer=3, vocab_size=256, dtype="float16", batch_size=4).to_dict()
    got = config("--resume", "--max_iters=7", "--dtype=auto", "--vocab_size=0", base=base)
    assert got == replace(RunConfig.from_dict(base), init_from="resume", max_iters=7)


def test_a_bad_flag_on_a_resume_is_the_users_fault() -> None:
    with pytest.raises(UsageError, match="grad_clip"):
        config("--resume", "--step_in_backward", "--gradient_accumulation_steps=1", base=RunConfig().to_dict())


def test_the_difference_of_two_configs_is_listed_in_order() -> None:
    assert diff(RunConfig(), RunConfig(n_layer=2, out_dir="a")) == [("out_dir", "out", "a"), ("n_layer", 12, 2)]


def _other(key: str) -> Any:
    one = knobs_of(RunConfig)[key]
    special = {"dtype": "float16", "n_head": 6, "n_embd": 1536, "device": "cpu", "backend": "gloo", "keep_last": 3,
               "block_size": 2048, "init_from": "resume", "min_lr": 1e-6, "learning_rate": 1e-3, "compile": False,
               "cuda_graphs": False, "recompute": "input", "weights": "bfloat16", "residual": "bfloat16",
               "optimizer": "adam8bit", "adam8bit": "bitsandbytes", "offload": "optimizer", "casts": "kept",
               "gradients": "kept", "states": "late", "budget": "8GiB", "leave": "2GiB", "rehearse": False}
    if key in special:
        return special[key]
    another = {"bool": lambda: not one.default, "text": lambda: one.default + "x", "int": lambda: one.default + 1,
               "float": lambda: one.default * 1.01 + 1e-3}
    return another[one.kind]()


RESUMABLE = {f.name for f in fields(RunConfig)} - FROZEN_ON_RESUME - {*TOGETHER_ON_RESUME}


@pytest.mark.parametrize("key", [f.name for f in fields(RunConfig)])
def test_what_may_change_on_a_resume_may_and_the_rest_may_not(key: str) -> None:
    optimizer = "adam8bit" if key == "adam8bit" else "adamw"
    recorded = RunConfig(gradient_accumulation_steps=1, grad_clip=0.0, optimizer=optimizer)  # which suits every saver
    wanted = replace(recorded, **{key: _other(key) if key != "gradient_accumulation_steps" else 2}).to_dict()
    if key in RESUMABLE:
        check_resume(recorded.to_dict(), wanted, {key})
    else:
        with pytest.raises(CheckpointError, match=key):
            check_resume(recorded.to_dict(), wanted, {key})
        check_resume(recorded.to_dict(), wanted, set())


def test_the_frozen_keys_are_those_that_make_it_the_same_run() -> None:
    assert FROZEN_ON_RESUME.issuperset(
        ["n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "seed", "dtype", "beta1", "beta2"])
    assert RESUMABLE.issuperset(
        ["max_iters", "learning_rate", "device", "compile", "grad_checkpoint", "eval_iters", "out_dir", "dropout",
         "loss_chunk", "init_from", "wandb_log"])


def test_a_refused_resume_lists_every_difference_and_how_to_go_on() -> None:
    recorded = RunConfig(n_layer=2, seed=5).to_dict()
    with pytest.raises(CheckpointError) as caught:
        check_resume(recorded, {**recorded, "n_layer": 3, "seed": 6, "max_iters": 9}, None)
    assert "n_layer=3 (it was 2)" in caught.value.what
    assert "seed=6 (it was 5)" in caught.value.what
    assert "max_iters" not in caught.value.what
    assert "--seed=5 --n_layer=2" in caught.value.fix


def test_a_resumed_step_may_be_split_otherwise_but_not_resized() -> None:
    recorded = RunConfig(batch_size=16, gradient_accumulation_steps=32).to_dict()
    split = {**recorded, "batch_size": 8, "gradient_accumulation_steps": 64}
    check_resume(recorded, split, {"batch_size", "gradient_accumulation_steps"})
    with pytest.raises(CheckpointError, match="512") as caught:
        check_resume(recorded, {**recorded, "batch_size": 8}, {"batch_size"})
    assert caught.value.fix == "--batch_size=8 --gradient_accumulation_steps=64"
    with pytest.raises(CheckpointError) as caught:
        check_resume(recorded, {**recorded, "batch_size": 7}, {"batch_size"})
    assert caught.value.fix == "--batch_size=16 --gradient_accumulation_steps=32"


# ---- the files in config/

CONFIGS = Path(__file__).parent.parent / "config"
MILLIONS = {"train_fineweb": 63.52, "notes_77m": 76.77, "notes_30m": 29.94, "gpt2_124m": 123.59, "gpt2_350m": 353.55,
            "gpt2_774m": 772.27, "gpt2_1558m": 1555.20, "shakespeare_char": 10.65, "demo": 0.82}
VOCAB = {"shakespeare_char": 65, "demo": 256}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_config_we_ship_is_valid_and_as_large_as_it_says(path: Path) -> None:
    got = config(str(path))
    assert got.out_dir.startswith("runs/")
    params = replace(got, vocab_size=VOCAB.get(path.stem, 0)).gpt_config().count_params(positions=False)
    assert round(params / 1e6, 2) == MILLIONS[path.stem]


def test_the_recommended_run_for_twelve_gigabytes_is_what_it_is_said_to_be() -> None:
    got = config(str(CONFIGS / "train_fineweb.py"))
    assert (got.batch_size, got.block_size, got.gradient_accumulation_steps, got.eval_batch_size, got.eval_iters,
            got.eval_interval, got.n_embd, got.n_head, got.grad_checkpoint) == (
                16, 1024, 32, 4, 100, 500, 512, 8, False)


@pytest.mark.parametrize(("changes", "says"), [
    (dict(step_in_backward=True, grad_clip=0.0), "gradient_accumulation_steps=1"),
    (dict(step_in_backward=True, gradient_accumulation_steps=1), "grad_clip=0"),
    (dict(step_in_backward=True, gradient_accumulation_steps=1, grad_clip=0.0, dtype="float16"), "float16"),
    (dict(optimizer="muon", weights="bfloat16"), "weights=bfloat16 works with optimizer"),
    (dict(optimizer="adam8bit", offload="optimizer"), "offload=optimizer works with optimizer=adamw"),
    (dict(adam8bit="bitsandbytes"), "a way of optimizer=adam8bit"),
    (dict(adam8bit="bitsandbytes", optimizer="adam8bit", weights="bfloat16"), "rounds weights to the nearest"),
    (dict(adam8bit="bitsandbytes", offload="gradients"), "does not work with offload=gradients"),
    (dict(cuda_graphs=True, dropout=0.1, offload="gradients"), "does not work with dropout=0.1 and offload=gradients")])
def test_savers_that_exclude_each_other_are_refused_in_words(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        RunConfig(**changes)
    assert says in refusal.value.what
