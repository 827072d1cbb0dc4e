"""Command lines: every spelling of an option, and the error for every mistake; options of the commands; help."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from fitgpt.config.argv import help_text, markdown_table, walk
from fitgpt.config.command_options import (
    COMMANDS,
    DemoOptions,
    EvalOptions,
    ExportOptions,
    PlanArguments,
    PrepareOptions,
    SampleOptions,
)
from fitgpt.config.fields import (
    Options,
    between,
    build,
    option,
    option_specs,
    parse_value,
    path_like,
    plain_name,
    positive,
)
from fitgpt.config.run_config import RunConfig
from fitgpt.core.errors import UsageError


@dataclass(frozen=True)
class Small(Options):
    command = "small"

    batch_size: int = option(12, "sequences", rule=positive, synonyms=("bs",))
    rate: float = option(0.5, "a rate", rule=between(-10, 10))
    bias: bool = option(False, "a switch")
    compile: bool | Literal["auto"] = option("auto", "another switch")
    start: str = option("x", "a text", short="s")
    mode: str = option("slow", "how", choices=("slow", "fast"), switches={"quick": "fast"})


def said(*argv: str) -> dict[str, Any]:
    return {each.key: each.value for each in walk(argv, Small)}


def error_of(*argv: str, cls: type[Options] = Small, **more: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        walk(argv, cls, **more)
    return caught.value


@pytest.mark.parametrize("argv", [
    ["--batch_size=8"], ["--batch-size=8"], ["--batch_size", "8"], ["--batch-size", "8"], ["--batch_size=8e0"],
    ["--batch_size=+8"], ["--batch_size=9", "--batch_size=8"], ["--batch_size=8", "--"],
])
def test_dashes_underscores_and_equals_signs_are_interchangeable(argv: list[str]) -> None:
    assert said(*argv) == {"batch_size": 8}


@pytest.mark.parametrize(("argv", "value"), [
    (["--compile"], True), (["--no-compile"], False), (["--no_compile"], False), (["--compile=False"], False),
    (["--compile=true"], True), (["--compile=1"], True), (["--compile=no"], False), (["--compile=auto"], "auto"),
    (["--compile", "False"], False), (["--compile", "auto"], "auto"), (["--compile", "--bias"], True),
    (["--no-compile", "--compile"], True),
])
def test_bool_options_take_a_value_or_none(argv: list[str], value: object) -> None:
    assert said(*argv)["compile"] == value


def test_assignments_keep_their_order_and_their_source(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("\nbatch_size = 3\nrate = 1")
    assert walk(["--rate", "-2", str(file), "--batch_size=12", "--quick"], Small) == [
        ("rate", -2.0, "--rate -2"), ("batch_size", 3, f"{file}:2"), ("rate", 1.0, f"{file}:3"),
        ("batch_size", 12, "--batch_size=12"), ("mode", "fast", "--quick")]


def test_a_flag_equal_to_its_default_still_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("batch_size = 3")
    assert build(Small, walk([str(file), "--batch_size=12"], Small)).batch_size == 12
    assert build(Small, walk(["--batch_size=12", str(file)], Small)).batch_size == 3


@pytest.mark.parametrize(("argv", "value"), [
    (["--start=a=b/c=d"], "a=b/c=d"), (["--start", "a=b"], "a=b"), (["--start="], ""),
    (["--start", "- item"], "- item"),
    (["--start=--x"], "--x"), (["-s", "hi"], "hi"), (["-shi"], "hi"), (["-s=hi"], "hi"), (["--start", "-"], "-"),
    (["--start", "-5"], "-5"), (["--start='abc'"], "abc"), (['--start="\\n"'], "\n"), (["--start='it's'"], "'it's'"),
    (["--start='"], "'"), (["--start=\\n"], "\\n"), (["--start=b'x'"], "b'x'"), (["--start", ""], ""),
    (["--start=日本"], "日本"),
])
def test_text_values_keep_equals_signs_dashes_and_spaces(argv: list[str], value: str) -> None:
    assert said(*argv) == {"start": value}


@pytest.mark.parametrize(("key", "text", "value"), [
    ("batch_size", "1_000", 1000), ("batch_size", "1e6", 1_000_000), ("batch_size", "2.5e3", 2500), ("rate", "5", 5.0),
    ("rate", "-.5", -0.5), ("rate", "1e-3", 0.001),
])
def test_numbers_are_converted_to_the_type_of_the_option(key: str, text: str, value: float) -> None:
    result = parse_value(Small, key, text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(("key", "text", "wanted"), [
    ("batch_size", "5*8", "whole number"), ("batch_size", "8.0", "whole number"), ("batch_size", "x", "whole"),
    ("batch_size", "", "whole"), ("batch_size", "0x10", "whole"), ("batch_size", "1e30", "whole"),
    ("batch_size", "9" * 30, "whole"), ("batch_size", "9" * 9000, "whole"), ("batch_size", "nan", "whole"),
    ("batch_size", "1e400", "whole"), ("batch_size", "2.55e1", "whole"), ("batch_size", "0", "above 0"),
    ("batch_size", "-1", "above 0"), ("batch_size", "True", "whole"), ("batch_size", "٣", "whole"),
    ("rate", "nan", "finite"), ("rate", "inf", "finite"), ("rate", "-Infinity", "finite"), ("rate", "1e999", "finite"),
    ("rate", "", "finite"), ("rate", "fast", "finite"), ("rate", "11", "at most 10"), ("rate", "-11", "at least -10"),
    ("bias", "maybe", "True or False"), ("bias", "", "True or False"), ("bias", "auto", "True or False"),
    ("compile", "2", "True, False or auto"), ("mode", "fats", "one of slow, fast"), ("mode", "", "one of slow, fast"),
])
def test_the_error_of_an_invalid_value_names_the_flag_and_what_it_takes(key: str, text: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        parse_value(Small, key, text)
    assert caught.value.what.startswith(f"--{key}={text}: {key} ")
    assert f"--{key}=" in caught.value.fix


@pytest.mark.parametrize("cls", COMMANDS.values(), ids=COMMANDS)
def test_the_fix_of_every_invalid_value_is_a_flag_that_works(cls: type[Options]) -> None:
    """Each option is given values that most options reject; what the error suggests must be accepted."""
    rejected = 0
    for one in option_specs(cls).values():
        for value in ("nan", "-1", "0", "1e30", "10 GB of it", "2118", "\n", ""):
            try:
                walk([f"--{one.name}={value}"], cls, config_files=False)
            except UsageError as error:
                rejected += 1
                (flag,) = shlex.split(error.fix)
                assert [each.key for each in walk([flag], cls, config_files=False)] == [one.name]
    assert rejected


@pytest.mark.parametrize(("typed", "fix"), [
    ("--gradient_accumulation_steps=0", "--gradient_accumulation_steps=1"), ("--keep_last=0", "--keep_last=2"),
    ("--n_layer=20000", "--n_layer=512"), ("--grad_clip=-1", "--grad_clip=0"), ("--budget=lots", "--budget=11.5GiB"),
    ("--dtype=float61", "--dtype=float16"), ("--seeed=8", "--seed=8"), ("--leave=-1", "--leave=1GiB")])
def test_the_fix_is_the_nearest_value_that_works(typed: str, fix: str) -> None:
    assert error_of(typed, cls=RunConfig).fix == fix


@pytest.mark.parametrize(("typed", "key", "value"), [
    ("--max_iters=10k", "max_iters", 10_000), ("--max_iters=1.5M", "max_iters", 1_500_000),
    ("--lr_decay_iters=1B", "lr_decay_iters", 10**9), ("--dtype=fp16", "dtype", "float16"),
    ("--dtype=bf16", "dtype", "bfloat16"), ("--dtype=half", "dtype", "float16"), ("--dtype=FP32", "dtype", "float32")])
def test_counts_and_data_types_are_taken_as_people_write_them(typed: str, key: str, value: object) -> None:
    assert [(each.key, each.value) for each in walk([typed], RunConfig)] == [(key, value)]


def test_eval_takes_the_names_of_train() -> None:
    got = options(EvalOptions, "runs/demo", "--eval_block_size=32", "--eval_batch_size=4")
    assert (got.block_size, got.eval_batch_size) == (32, 4)


@pytest.mark.parametrize(("argv", "fix"), [
    (["--batch_sise=8"], "--batch_size=8"), (["--bs=8"], "--batch_size=8"), (["--Batch_Size=8"], "--batch_size=8"),
    (["--no-bais"], "--no_bias"), (["--qick"], "--quick"),
])
def test_an_unknown_option_gets_the_nearest_as_fix(argv: list[str], fix: str) -> None:
    error = error_of(*argv)
    assert "not an option of `fitgpt small`" in error.what
    assert fix in error.fix


def test_an_option_with_one_dash_gets_two_as_fix() -> None:
    assert error_of("-batch_size=8", cls=RunConfig, other_commands=[EvalOptions]).fix == "--batch_size=8"


def test_an_option_of_another_command_gets_that_command_as_fix() -> None:
    error = error_of("--temperature=1", cls=RunConfig, other_commands=[SampleOptions])
    assert "It is an option of `fitgpt sample`." in error.what
    assert error.fix == "fitgpt sample --help-all"


def test_an_option_of_a_run_is_said_to_be_trains() -> None:
    error = error_of("--eval_interval=5", cls=SampleOptions, other_commands=[PlanArguments, RunConfig])
    assert error.fix == "fitgpt train --help-all"


@pytest.mark.parametrize("argv", [["--zzzzqqq=1"], ["--=5"], ["-z"], ["---"], ["-5"], ["--no-"], ["--no-start"]])
def test_an_option_like_no_other_gets_help_as_fix(argv: list[str]) -> None:
    error = error_of(*argv)
    assert "not an option" in error.what
    assert error.fix


@pytest.mark.parametrize("argv", [["--batch_size"], ["--batch_size", "--bias"], ["-s"], ["--start", "-s"],
                                  ["--start", "--"]])
def test_an_option_without_its_value_is_an_error(argv: list[str]) -> None:
    assert "needs a value" in error_of(*argv).what


def test_a_negative_number_is_a_value() -> None:
    assert said("--rate", "-1e-1") == {"rate": -0.1}
    assert "above 0" in error_of("--batch_size", "-5").what


@pytest.mark.parametrize("argv", [["--no-bias=True"], ["--quick=1"]])
def test_a_bare_switch_takes_no_value(argv: list[str]) -> None:
    assert "takes no value" in error_of(*argv).what


def test_an_option_without_dashes_gets_them_as_fix() -> None:
    assert error_of("batch_size=8").fix == "--batch_size=8"


def test_after_two_dashes_everything_is_positional() -> None:
    assert build(PrepareOptions, walk(["--", "--odd", "x"], PrepareOptions, config_files=False)).input == ("--odd", "x")


def test_a_config_file_may_set_borrowed_options(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("out_dir = 'runs/a'\nbatch_size = 4\n")
    found = walk([str(file)], SampleOptions, borrowed=option_specs(RunConfig))
    assert [(each.key, each.value) for each in found] == [("out_dir", "runs/a")]
    assert "not an option" in error_of(str(file), cls=SampleOptions).what


def test_options_are_checked_when_constructed() -> None:
    with pytest.raises(UsageError, match="batch_size=0: batch_size must be above 0"):
        Small(batch_size=0)
    with pytest.raises(UsageError, match="finite"):
        Small(rate=float("nan"))
    assert Small(rate=2).rate == 2.0


@pytest.mark.parametrize("path", ["", "  ", "a\0b", "a\nb", "x" * 256, "é" * 128, "a/" * 2100, "\ud800", "a\x1b[31m"])
def test_an_impossible_path_is_rejected(path: str) -> None:
    assert path_like(path)


@pytest.mark.parametrize("path", ["out", "../../x", "/a/b", "runs/日本", "a b", "🙂", "x" * 255, r"C:\runs\a", "~/x"])
def test_a_possible_path_is_accepted(path: str) -> None:
    assert path_like(path) is None


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", "CON", "nul.txt", "com1", "a.", "a ", "..", ".", "x" * 300,
                                  "a:b", "a\0", "a\n", "é" * 60])
def test_a_name_with_a_path_or_reserved_by_windows_is_rejected(name: str) -> None:
    assert plain_name(name)


@pytest.mark.parametrize("name", ["fineweb", "a.b-c_d", "日本", "🙂", "console", ".hidden"])
def test_a_plain_name_is_accepted(name: str) -> None:
    assert plain_name(name) is None


# ---- options of the commands


def options(cls: type[Options], *argv: str) -> Any:
    return build(cls, walk(argv, cls, config_files=cls is SampleOptions))


def test_sample_takes_the_flags_of_nanogpts_sample_py() -> None:
    got = options(SampleOptions, "--init_from=gpt2-xl", "--start=What is the answer?", "--num_samples=5",
                  "--max_new_tokens=100", "--top_k=50", "--device=cuda:1", "--dtype=float16", "--seed=1")
    assert (got.init_from, got.start, got.num_samples, got.max_new_tokens, got.top_k, got.device) == (
        "gpt2-xl", "What is the answer?", 5, 100, 50, "cuda:1")
    defaults = ("out", "", "resume", "\n", 10, 500, 0.8, 200, 1.0, 1337, "auto", "auto", False)
    assert SampleOptions() == SampleOptions(*defaults)


def test_positional_arguments_set_their_option() -> None:
    assert options(SampleOptions, "runs/demo", "--top_p=.9").out_dir == "runs/demo"
    assert options(EvalOptions, "runs/demo", "--json").json is True
    got = options(ExportOptions, "runs/demo", "-o", "my-gpt", "--which=500")
    assert (got.run, got.out, got.which) == ("runs/demo", "my-gpt", "500")
    assert options(PrepareOptions, "a.txt", "--name=n", "b/", "c.py").input == ("a.txt", "b/", "c.py")


@pytest.mark.parametrize(("cls", "argv", "what"), [
    (EvalOptions, ["a", "b"], "takes one run, but got 'a' and 'b'"), (SampleOptions, ["a", "b"], "takes one out_dir"),
    (DemoOptions, ["x"], "takes only options"), (EvalOptions, [], "needs RUN"), (ExportOptions, ["x"], "needs -o OUT"),
    (ExportOptions, ["x", "-o", "y", "--which=worst"], "best, last"), (EvalOptions, [""], "must not be empty"),
    (ExportOptions, ["x", "-o", "y", "--which=-1"], "best, last"),
    (ExportOptions, ["x", "-o", ""], "must not be empty"),
    (EvalOptions, ["x", "--which=worst"], "best, last"), (SampleOptions, ["--which=1.5"], "best, last"),
    (SampleOptions, ["--temperature=-1"], "below 0"), (SampleOptions, ["--top_p=0"], "above 0"),
    (SampleOptions, ["--top_p=1.1"], "at most 1"), (SampleOptions, ["--num_samples=0"], "at least 1"),
    (SampleOptions, ["--max_new_tokens=0"], "at least 1"), (SampleOptions, ["--top_k=-1"], "at least 0"),
    (PrepareOptions, [], "one source of text, but got none"), (PrepareOptions, ["a", "--embedded"], "and --embedded"),
    (PrepareOptions, ["a", "--hub=b"], "and --hub"), (PrepareOptions, ["a", "--hub_config=b"], "without --hub"),
    (PrepareOptions, ["a", "--name=../x"], "plain name"), (PrepareOptions, ["a", "--name=CON"], "plain name"),
    (PrepareOptions, ["a", "--max_tokens=many"], "count such as"),
    (PrepareOptions, ["a", "--shard_tokens=0"], "above 0"),
    (PrepareOptions, ["a", "--max_tokens=-5"], "count such as"), (PrepareOptions, ["a", "--shard_tokens="], "above 0"),
    (PrepareOptions, ["a", "--val_fraction=0"], "above 0"), (PrepareOptions, ["a", "--val_fraction=1"], "below 1"),
    (PrepareOptions, ["a", "--tokenizer=byte"], "one of gpt2, bytes"),
    (PrepareOptions, ["a", "--processes=-1"], "at least 0"),
    (PrepareOptions, ["a", "--name=x", "--out=y"], "both say where"),
    (PrepareOptions, ["a", "--out=a\nb"], "character"),
])
def test_invalid_options_of_a_command_are_an_error(cls: type[Options], argv: list[str], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        options(cls, *argv)


@pytest.mark.parametrize("count", ["", "0", "1B", "500M", "1_000", "2.5k"])
def test_token_counts_take_suffixes(count: str) -> None:
    assert options(PrepareOptions, "a", f"--max_tokens={count}").max_tokens == count


# ---- help


@pytest.mark.parametrize("columns", ["0", "1", "80", "1000", "-3", "wide"])
def test_the_whole_help_fits_the_terminal_and_lists_every_option(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for cls in (RunConfig, PrepareOptions, SampleOptions, EvalOptions, ExportOptions, DemoOptions):
        text = help_text(cls, everything=True)
        for one in option_specs(cls).values():
            assert one.name in text or one.name.upper() in text
            assert all(word in text for word in one.help.split())
            if not (one.required or one.kind == "texts"):
                assert f"--{one.name}{'' if one.default is False else '='}" in text
        widest = 100 if columns == "1000" else 80
        assert max(len(line) for line in text.splitlines() if line.strip() not in cls.examples) <= widest


@pytest.mark.parametrize("cls", COMMANDS.values(), ids=COMMANDS)
def test_help_is_short_and_each_text_begins_with_a_noun_or_a_verb(cls: type[Options]) -> None:
    assert len(help_text(cls).splitlines()) <= 50
    for one in option_specs(cls).values():
        assert one.help.split()[0] not in ("of", "its", "if", "see", "by", "after", "before")


def test_help_lists_only_options_that_the_command_uses() -> None:
    training = ("--wait", "--step_up", "--rehearse", "--wandb_run_name", "--plan", "--fit", "--learning_rate")
    for command in ("plan", "fit", "explain"):
        own, everything = help_text(COMMANDS[command]), help_text(COMMANDS[command], everything=True)
        assert "--batch_size=12" not in own
        assert "--batch_size=12" in everything
        assert not [flag for flag in training if re.search(rf"^  {flag}\b", everything, re.MULTILINE)]
    assert "  --all-cards  " in help_text(PlanArguments)
    assert all(f"  {flag}" in help_text(RunConfig, everything=True) for flag in training)


def test_help_shows_defaults_choices_and_switches() -> None:
    text = help_text(Small)
    assert "--batch_size=12" in text
    assert "how (slow, fast); --quick is short for --mode=fast" in " ".join(text.split())
    assert "-s, --start=x" in text
    assert "--start='\\n'" in help_text(SampleOptions)


def test_the_docs_table_has_a_row_for_every_option() -> None:
    table = markdown_table(RunConfig)
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == len(option_specs(RunConfig))
    assert all(line.count("|") == 4 for line in rows)
    assert "| `--n_layer` | `12` | number of blocks |" in rows
