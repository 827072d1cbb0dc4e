"""RunConfig: nanoGPT's names and defaults, values that are errors, rules between options, recorded configs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.fields import option_specs, options_with
from fitgpt.config.run_config import (
    FALLBACK_OPTIONS,
    FIXED_BY_PLAN,
    FROZEN_ON_RESUME,
    NOT_NANOGPTS,
    PAGE_OPTIONS,
    RunConfig,
    config_from,
    diff,
    gpt2_shapes,
)
from fitgpt.core.errors import CheckpointError, UsageError

NANOGPT = dict(
    out_dir="out", eval_interval=2000, log_interval=1, eval_iters=200, eval_only=False, always_save_checkpoint=True,
    init_from="scratch", wandb_log=False, wandb_project="owt", wandb_run_name="gpt2", dataset="openwebtext",
    gradient_accumulation_steps=40, batch_size=12, block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.0,
    bias=False, learning_rate=6e-4, max_iters=600000, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0,
    decay_lr=True, warmup_iters=2000, lr_decay_iters=600000, min_lr=6e-5, backend="nccl")


def config(*argv: str, base: dict[str, Any] | None = None) -> RunConfig:
    return config_from(walk(argv, RunConfig), base)[0]


def notes(*argv: str) -> list[str]:
    return config_from(walk(argv, RunConfig))[1]


def error_of(*argv: str) -> UsageError:
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
    "--device=", "--dtype=fp8", "--compile=maybe", "--backend=mpi", "--out_dir=", "--out_dir=a\nb",
    "--out_dir=" + "x" * 300, "--dataset=", "--bias=2", "--init_from=",
])
def test_an_invalid_value_is_an_error_that_names_the_option(flag: str) -> None:
    assert error_of(flag).what.startswith(f"{flag}: {flag[2:].partition('=')[0]} ")


def test_keep_last_below_two_is_an_error_with_the_reason() -> None:
    assert "one must survive" in error_of("--keep_last=1").what


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "mps"])
def test_device_takes_the_names_of_torch(device: str) -> None:
    assert config(f"--device={device}").device == device


@pytest.mark.parametrize(("width", "heads", "head_counts", "widths", "fixes"), [
    (512, 12, "8 or 16", "504 or 516", ["--n_head=8", "--n_head=16", "--n_embd=480", "--n_embd=576"]),
    (768, 11, "8 or 12", "759 or 770", ["--n_head=12", "--n_embd=792"]),
    (8, 12, "1", "12", ["--n_head=1", "--n_embd=12"]),
    (7, 3, "1 or 7", "6 or 9", ["--n_head=7", "--n_embd=24"]),
    (1600, 24, "20 or 25", "1584 or 1608", ["--n_embd=1536"]),
])
def test_a_width_that_is_no_multiple_of_the_heads_gets_the_nearest_shapes_as_fix(
        width: int, heads: int, head_counts: str, widths: str, fixes: list[str]) -> None:
    error = error_of(f"--n_embd={width}", f"--n_head={heads}")
    assert f"n_embd={width} is not a multiple of n_head={heads}" in error.what
    assert f"width {width}: {head_counts}." in error.what
    assert f"{heads} heads: {widths}" in error.what
    assert all(fix in error.fix.split() for fix in fixes)


@pytest.mark.parametrize(("width", "heads"), [
    (width, heads) for width in (8, 64, 100, 512, 514, 769, 1023) for heads in (3, 5, 7, 11, 12, 13, 100)
    if width % heads])
def test_every_shape_in_that_fix_works(width: int, heads: int) -> None:
    for flag in error_of(f"--n_embd={width}", f"--n_head={heads}").fix.split(" or "):
        config(f"--n_embd={width}", f"--n_head={heads}", flag)


def test_eval_block_size_is_at_most_block_size() -> None:
    assert "larger than block_size=64" in error_of("--block_size=64", "--eval_block_size=65").what
    assert config("--block_size=64", "--eval_block_size=64").eval_block == 64


@pytest.mark.reproduction
def test_a_batch_and_a_block_that_together_are_too_many_tokens_are_both_named() -> None:
    error = error_of("--batch_size=2147483647", "--block_size=262144")
    assert "batch_size=2147483647 × block_size=262144 is 562,949,953,159,168 tokens" in error.what
    assert config(error.fix, "--block_size=262144").batch_size == 2**32 // 262144


@pytest.mark.reproduction
def test_more_layers_than_a_forecast_takes_seconds_for_are_an_error() -> None:
    assert config("--n_layer=512").n_layer == 512
    assert "must be at most 512" in error_of("--n_layer=513").what


@pytest.mark.parametrize(("flags", "says"), [
    (["--learning_rate=3e-5"], "min_lr=6e-05 is above learning_rate=3e-05"),
    (["--lr_decay_iters=1000"], "warmup_iters=2000 is above lr_decay_iters=1000")])
def test_an_odd_learning_rate_schedule_is_accepted_with_a_note(flags: list[str], says: str) -> None:
    _, notes = config_from(walk(flags, RunConfig))
    assert [says in note for note in notes] == [True]
    assert config_from(walk([*flags, "--decay_lr=False"], RunConfig))[1] == []
    assert config_from([])[1] == []


def test_max_iters_may_be_below_warmup_iters() -> None:
    assert config("--max_iters=20").warmup_iters == 2000


def test_eval_sizes_of_zero_mean_the_training_sizes() -> None:
    got = config("--batch_size=16", "--block_size=512")
    assert (got.eval_batch, got.eval_block) == (16, 512)
    got = config("--batch_size=16", "--eval_batch_size=4", "--eval_block_size=256")
    assert (got.eval_batch, got.eval_block) == (4, 256)


def test_the_default_vocabulary_is_50304() -> None:
    assert RunConfig().gpt_config().vocab_size == 50304
    shape = RunConfig(vocab_size=100, n_layer=3, grad_checkpoint=True, dropout=0.1).gpt_config()
    assert (shape.vocab_size, shape.n_layer, shape.grad_checkpoint, shape.dropout) == (100, 3, True, 0.1)
    assert shape.bias is False
    assert RunConfig().tokens_per_step == 491_520


# ---- init_from


@pytest.mark.parametrize("model", gpt2_shapes)
def test_init_from_gpt2_sets_shape_bias_and_vocabulary(model: str) -> None:
    got = config(f"--init_from={model}")
    assert {key: getattr(got, key) for key in gpt2_shapes[model]} == gpt2_shapes[model]
    assert (got.bias, got.vocab_size, got.dropout) == (True, 50257, 0.0)


def test_init_from_gpt2_overrides_shape_options_with_a_note() -> None:
    argv = ("--n_layer=3", "--bias=True", "--init_from=gpt2", "--vocab_size=50304")
    assert config(*argv).n_layer == 12
    assert notes(*argv) == ["--n_layer=3: n_layer is 12 here, not 3, because init_from=gpt2.",
                            "--vocab_size=50304: vocab_size is 50257 here, not 50304, because init_from=gpt2."]
    assert notes("--init_from=gpt2", "--n_layer=12") == []
    assert notes("--n_layer=3") == []


def test_init_from_gpt2_limits_block_size_to_1024() -> None:
    assert "1024 positions" in error_of("--init_from=gpt2", "--block_size=2048").what
    assert config("--init_from=gpt2", "--block_size=512").block_size == 512


def test_init_from_takes_a_folder_that_exists(tmp_path: Path) -> None:
    assert config(f"--init_from={tmp_path}").init_from == str(tmp_path)
    assert "gpt2-medium" in error_of("--init_from=gpt2-medum").fix
    assert "no such folder" in error_of(f"--init_from={tmp_path}/missing").what
    (tmp_path / "file").touch()
    assert "no such folder" in error_of(f"--init_from={tmp_path}/file").what


def test_resume_is_short_for_init_from_resume() -> None:
    assert config("--resume").init_from == "resume"
    assert "takes no value" in error_of("--resume=out").what


def test_resume_followed_by_another_init_from_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("init_from = 'gpt2'")
    error = error_of("--resume", str(file))
    assert f"{file}:1 says init_from=gpt2" in error.what
    assert config(str(file), "--resume").init_from == "resume"


# ---- records and resumes


def test_a_config_survives_json() -> None:
    one = RunConfig(compile=False, learning_rate=1e-3, out_dir="日本")
    assert RunConfig.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_nanogpts_recorded_config_is_understood() -> None:
    assert RunConfig.from_dict({**NANOGPT, "device": "cuda", "dtype": "bfloat16", "compile": True}).device == "cuda"


def test_unknown_keys_of_a_recorded_config_are_named() -> None:
    with pytest.raises(CheckpointError, match="rope, zeta, which this version"):
        RunConfig.from_dict({"zeta": 1, "rope": 2, "n_layer": 3})


@pytest.mark.parametrize("record", [
    {"learning_rate": float("nan")}, {"n_layer": "12"}, {"n_layer": None}, {"n_head": 5}])
def test_an_invalid_recorded_config_is_a_checkpoint_error(record: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="recorded config"):
        RunConfig.from_dict(record)
    with pytest.raises(CheckpointError, match="recorded config"):
        config_from([], record)


def test_a_resumed_run_takes_its_recorded_config_and_the_given_options() -> None:
    base = RunConfig(n_layer=3, vocab_size=256, dtype="float16", batch_size=4).to_dict()
    got = config("--resume", "--max_iters=7", "--dtype=auto", "--vocab_size=0", base=base)
    assert got == replace(RunConfig.from_dict(base), init_from="resume", max_iters=7)


def test_an_invalid_option_on_a_resume_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="grad_clip"):
        config("--resume", "--step_in_backward", "--gradient_accumulation_steps=1", base=RunConfig().to_dict())


def test_diff_lists_differences_in_the_order_of_declaration() -> None:
    assert diff(RunConfig(), RunConfig(n_layer=2, out_dir="a")) == [("out_dir", "out", "a"), ("n_layer", 12, 2)]


# ---- attributes of options


def test_nanogpt_has_exactly_the_options_that_say_so() -> None:
    device = {"device", "dtype", "compile", "vocab_size"}  # under other defaults there; the vocabulary is the data's
    assert set(options_with(RunConfig, nanogpt=True)) == NANOGPT.keys() | device


def test_options_on_the_page_and_in_fallback_plans_affect_memory() -> None:
    affecting = set(options_with(RunConfig, affects_memory=True))
    assert {name for names in PAGE_OPTIONS.values() for name in names} == affecting - {"eval_only"}
    assert set(FALLBACK_OPTIONS) < affecting
    assert set(NOT_NANOGPTS) < affecting
    assert set(FIXED_BY_PLAN) == affecting - {"eval_only", "grad_clip"}


def test_fallback_plans_never_change_what_a_resume_cannot() -> None:
    assert not FROZEN_ON_RESUME & set(FALLBACK_OPTIONS)


@pytest.mark.parametrize(("option", "term"), [
    ("grad_checkpoint", "gradient checkpointing"), ("grad_checkpoint", "gradient_checkpointing_enable"),
    ("saved_activations", "gradient checkpointing"), ("dtype", "mixed precision"), ("dtype", "GradScaler"),
    ("cuda_graphs", "CUDA graphs"), ("offload", "CPU offload"), ("grad_clip", "gradient clipping"),
    ("gradient_accumulation_steps", "gradient accumulation")])
def test_help_has_the_terms_that_people_search_for(option: str, term: str) -> None:
    assert term in option_specs(RunConfig)[option].help


# ---- the files in config/

CONFIGS = Path(__file__).parents[2] / "config"
MILLIONS = {"train_fineweb": 63.52, "notes_77m": 76.77, "notes_30m": 29.94, "gpt2_124m": 123.59, "fineweb_12gb": 123.59,
            "gpt2_350m": 353.55, "gpt2_774m": 772.27, "gpt2_1558m": 1555.20, "shakespeare_char": 10.65, "demo": 0.83}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_every_file_in_config_states_its_vocabulary_and_has_the_stated_size(path: Path) -> None:
    got = config(str(path))
    assert got.out_dir.startswith("runs/")
    assert got.vocab_size > 0
    assert round(got.gpt_config().count_params(positions=False) / 1e6, 2) == MILLIONS[path.stem]


def test_notes_30m_is_the_run_of_the_reading() -> None:
    got = config(str(CONFIGS / "notes_30m.py"))
    assert (got.n_layer, got.n_head, got.n_embd, got.batch_size, got.block_size, got.gradient_accumulation_steps,
            got.dtype) == (6, 6, 384, 16, 512, 4, "float16")


def test_train_fineweb_has_the_documented_settings() -> None:
    got = config(str(CONFIGS / "train_fineweb.py"))
    assert (got.batch_size, got.block_size, got.gradient_accumulation_steps, got.eval_batch_size, got.eval_iters,
            got.eval_interval, got.n_embd, got.n_head, got.grad_checkpoint) == (
                16, 1024, 32, 4, 100, 500, 512, 8, False)


@pytest.mark.parametrize(("changes", "says"), [
    (dict(step_in_backward=True, grad_clip=0.0), "gradient_accumulation_steps=1"),
    (dict(step_in_backward=True, gradient_accumulation_steps=1), "grad_clip=0"),
    (dict(step_in_backward=True, gradient_accumulation_steps=1, grad_clip=0.0, dtype="float16"), "float16"),
    (dict(optimizer="muon", weights="bfloat16"), "optimizer=muon works only with weights=float32"),
    (dict(optimizer="adam8bit", offload="optimizer"), "optimizer=adam8bit works only with offload=none"),
    (dict(adam8bit="bitsandbytes"), "a variant of optimizer=adam8bit"),
    (dict(adam8bit="bitsandbytes", optimizer="adam8bit", weights="bfloat16"), "rounds weights to nearest"),
    (dict(adam8bit="bitsandbytes", offload="gradients"), "adam8bit=bitsandbytes works only with offload=none"),
    (dict(cuda_graphs=True, dropout=0.1, offload="gradients"), "cuda_graphs=True does not work with dropout=0.1"),
    (dict(cuda_graphs=True, offload="gradients"), "offload=gradients works only with cuda_graphs=auto")])
def test_settings_that_exclude_each_other_are_an_error(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        RunConfig(**changes)
    assert says in error.value.what
