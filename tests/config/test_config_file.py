"""Config files: what they may contain, what they may not, and that nothing in them is executed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fitgpt.config.argv import walk
from fitgpt.config.config_file import MAX_FILE_BYTES, read_config
from fitgpt.config.run_config import RunConfig, config_from
from fitgpt.core.errors import UsageError


def values(tmp_path: Path, text: str | bytes, **scope: object) -> dict[str, object]:
    path = tmp_path / "x.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    settings, _ = read_config(str(path), scope, "train")
    return {setting.key: setting.value for setting in settings}


def config_of(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "x.py"
    path.write_text(text)
    return config_from(walk([str(path)], RunConfig))[0]


@pytest.mark.parametrize(("expression", "value"), [
    ("5 * 8", 40), ("-3", -3), ("2 ** 10", 1024), ("7 // 2", 3), ("7 % 4", 3), ("1 / 4", 0.25), ("1e-1", 0.1),
    ("1_000", 1000), ("'ft-' + 'x'", "ft-x"), ("'ab' * 2", "abab"), ("not True", False), ("3 if 2 > 1 else 4", 3),
    ("1 < 2 < 2", False), ("True and 5", 5), ("0 or 6", 6), ("str(12)", "12"), ("int('7')", 7), ("float(2)", 2.0),
    ("f'gpt-{1 + 1}'", "gpt-2"), ("(1 +\n  2)", 3), ("None", None), ("'a' 'b'", "ab"), ("2 ** -1", 0.5),
])
def test_literals_and_arithmetic_have_pythons_value(tmp_path: Path, expression: str, value: object) -> None:
    result = values(tmp_path, f"x = {expression}")["x"]
    assert result == value
    assert type(result) is type(value)


def test_names_set_above_may_be_read(tmp_path: Path) -> None:
    assert values(tmp_path, "a = 4\nb = a * 2\nc = d = a + b\nb += 1\ne: int = 3") == {
        "a": 4, "b": 9, "c": 12, "d": 12, "e": 3}


def test_time_time_may_be_called(tmp_path: Path) -> None:
    before = time.time()
    assert float(str(values(tmp_path, "import time\nx = str(time.time())")["x"])) >= before


def test_values_given_before_the_file_may_be_read(tmp_path: Path) -> None:
    assert values(tmp_path, "lr_decay_iters = max_iters", max_iters=7) == {"lr_decay_iters": 7}


@pytest.mark.parametrize("text", [
    b"\xef\xbb\xbfx = 1\n", b"x = 1\r\n", b"# -*- coding: latin-1 -*-\nx = 1 # \xc3\xa9\n", b'"""doc"""\nx = 1',
    b"x = 1", b"\n\n# only\nx = 1\npass\n", b"x = 1;",
])
def test_byte_order_marks_line_ends_and_docstrings_are_accepted(tmp_path: Path, text: bytes) -> None:
    assert values(tmp_path, text) == {"x": 1}


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert values(tmp_path, "") == {}


@pytest.mark.parametrize("line", [
    "for i in range(3): batch_size = i", "while True: pass", "def f(): pass", "class A: pass", "import os",
    "import time, os", "import time as t", "from time import time", "from os import system", "x = open('/etc/passwd')",
    "x = __import__('os').system('true')", "x = eval('1')", "exec('x = 1')", "x = os.environ", "x = 'a'.upper()",
    "x = [1, 2]", "x = (1, 2)", "x = {1: 2}", "x = lambda: 1", "x = [i for i in 'ab']", "(x := 5)", "del batch_size",
    "if True: x = 1", "with open('a') as f: x = 1", "try:\n    x = 1\nexcept E:\n    pass", "a, b = 1, 2",
    "x = 'abc'[0]", "x = print('hi')", "print('hi')", "x = 1j", "x = b'ab'", "x = ...", "x = 1 << 3", "x = 1 & 3",
    "x = ~1", "x = 'a' in 'ab'", "x = 1 is 1", "x = f'{5:>9}'", "x = f'{5!r}'", "x = str(1, 2)", "x = int(x=3)",
    "x = time.time(1)", "x = time.sleep(9)", "x.y = 3", "x[0] = 3", "x = '%99d' % 3", "x = str()", "global x",
    "assert True", "raise ValueError", "return 5", "x = await y", "x: int", "x = *'ab',", "x = max(1, 2)",
    "x = time", "x = str",
])
def test_other_statements_are_an_error_with_the_line_and_never_run(tmp_path: Path, line: str,
                                                                   capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        values(tmp_path, f"# first\nbatch_size = 4\n{line}\n")
    assert "x.py:3: `" in caught.value.what
    assert capsys.readouterr().out == ""


def test_the_error_shows_the_text_and_says_that_configs_are_not_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.py:1: `open\('f'\)` .*read, not run"):
        values(tmp_path, "x = open('f')")


@pytest.mark.parametrize("expression", [
    "9 ** 9 ** 9", "2 ** 10000000", "'x' * 10**9", "10**9 * 'x'", "('x' * 9000) * 9000", "10 ** 80 * 10 ** 80",
    "9" * 4000, "int(1e300)", "'a' * 6000 + 'b' * 6000",
    "f\"{'a' * 6000}{'a' * 6000}{open('stops before this')}\"",
])
def test_huge_values_are_an_error(tmp_path: Path, expression: str) -> None:
    with pytest.raises(UsageError, match="too large"):
        values(tmp_path, f"x = {expression}")


@pytest.mark.parametrize(("expression", "why"), [
    ("1 / 0", "division by zero"), ("1 + 'a'", "unsupported"), ("int('a')", "invalid literal"),
    ("2.0 ** 5000", "computed"), ("(-1) ** 0.5", "not a real number"), ("unknown + 1", "not set above"),
    ("-'a'", "bad operand"), ("1 < 'a'", "not supported"), ("int(float('inf'))", "infinity"),
])
def test_arithmetic_that_fails_is_an_error_with_the_line(tmp_path: Path, expression: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        values(tmp_path, f"\nx = {expression}")
    assert "x.py:2: `" in caught.value.what


@pytest.mark.parametrize("text", [
    "x = " + "(" * 5000 + "1" + ")" * 5000, "x = " + "-" * 100_000 + "1", "x = " + "+".join(["1"] * 20_000),
    "x = " + "not " * 50_000 + "1", "x = " + "[" * 150 + "]" * 150, "x = " + "+".join(["1"] * 600),
])
def test_deep_nesting_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError):
        values(tmp_path, text)


@pytest.mark.parametrize(("raw", "why"), [
    (b"x = '\xff\xfe'", "not UTF-8"), ("x = 1".encode("utf-16"), "not UTF-8"), (b"x = 1\x00", "NUL|null"),
    (b"x = = 1", r"x\.py:1: `x = = 1` is not Python"), (b"#" * (MAX_FILE_BYTES + 1), "larger than 64.0 KiB"),
    (b"  x = 1\ny = 2", "not Python"),
])
def test_a_file_that_is_not_python_text_is_an_error(tmp_path: Path, raw: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        values(tmp_path, raw)


@pytest.mark.parametrize("line", ["n_layer = '12'", "min_lr = -1", "dtype = 'int8'", "batch_size = 0"])
def test_the_fix_of_a_value_in_a_file_is_a_line_of_the_file(tmp_path: Path, line: str) -> None:
    """A flag beside the file would not be enough: the file would still be invalid."""
    file = tmp_path / "x.py"
    file.write_text(line)
    with pytest.raises(UsageError, match=line) as caught:
        walk([str(file)], RunConfig)
    file.write_text(caught.value.fix)
    assert walk([str(file)], RunConfig)[0].key == line.partition(" ")[0]


@pytest.mark.parametrize(("path", "why"), [
    ("nowhere.py", "no config file"), (".", "is a folder"), ("a\0b.py", "cannot be read"),
    ("x" * 300 + ".py", "cannot"),
])
def test_an_unreadable_path_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str,
                                                      why: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=why):
        read_config(path, {}, "train")


def test_a_missing_file_gets_the_nearest_as_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/train_fineweb.py").touch()
    for typed in ("train_fineweb.py", "train_fineweb", "config/train_finweb.py"):
        with pytest.raises(UsageError) as caught:
            read_config(typed, {}, "train")
        assert caught.value.fix == "fitgpt train config/train_fineweb.py"


@pytest.mark.parametrize("file", ["run.json", "ckpt.pt"])
def test_a_run_folder_as_config_file_gets_the_resume_command_as_fix(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / file).touch()
    with pytest.raises(UsageError, match="is a folder") as caught:
        read_config("my run", {}, "train")
    assert caught.value.fix == "fitgpt train --resume '--out_dir=my run'"


def test_a_missing_file_like_no_other_gets_a_list_of_config_files(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/train_gpt2.py").touch()
    (tmp_path / "model.py").touch()
    with pytest.raises(UsageError) as caught:
        read_config("zzz.py", {}, "plan")
    assert caught.value.what == "There is no config file 'zzz.py'. There are: config/train_gpt2.py."
    assert caught.value.fix == "fitgpt plan config/train_gpt2.py"


@pytest.mark.parametrize("typed", ["vit.py", "vitt.py", "vit", "zzz.py"])
def test_a_training_script_is_never_the_fix_of_a_missing_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                typed: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/vit.py").write_text("import torch\n")
    with pytest.raises(UsageError, match="There is no config file") as caught:
        read_config(typed, {}, "plan")
    assert "vit.py" not in str(caught.value).replace(repr(typed), "")


def test_an_invalid_escape_sequence_prints_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert values(tmp_path, r"x = '\d'") == {"x": r"\d"}
    assert not recwarn.list


# ---- as `fitgpt train` reads them


def test_a_name_that_a_later_line_reads_need_not_be_an_option(tmp_path: Path) -> None:
    assert config_of(tmp_path, "tokens = 2**15\nbatch_size = tokens // 1024").batch_size == 32


def test_an_unknown_name_gets_the_nearest_as_fix(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, "batch_size = 4\nlearnig_rate = 1e-3")
    assert "x.py:2: learnig_rate is not an option" in caught.value.what
    assert caught.value.fix.startswith("learning_rate = ")


def test_a_file_can_read_defaults_and_earlier_flags(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("min_lr = learning_rate / 10")
    assert config_of(tmp_path, "min_lr = learning_rate / 10").min_lr == pytest.approx(6e-5)
    assert config_from(walk(["--learning_rate=1", str(path)], RunConfig))[0].min_lr == 0.1


@pytest.mark.parametrize(("line", "wanted"), [
    ("batch_size = 'eight'", "whole number"), ("batch_size = 2.5", "whole number"), ("batch_size = True", "whole"),
    ("learning_rate = 'x'", "finite"), ("learning_rate = float('nan')", "finite"),
    ("learning_rate = float('inf')", "finite"), ("compile = 'maybe'", "True, False or auto"),
    ("bias = 2", "True or False"), ("dataset = 5", "text"), ("batch_size = None", "whole"),
    ("n_layer = 0", "at least 1"),
])
def test_values_in_files_are_checked_like_flags_and_named_by_line(tmp_path: Path, line: str,
                                                                  wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted) as caught:
        config_of(tmp_path, f"# one\n{line}")
    assert "x.py:2: " in caught.value.what


def test_whole_floats_and_zero_or_one_are_converted(tmp_path: Path) -> None:
    config = config_of(tmp_path, "max_iters = 1e4\nlearning_rate = 1\ncompile = 0\nweight_decay = 0")
    assert (config.max_iters, config.learning_rate, config.compile) == (10_000, 1.0, False)
    assert isinstance(config.max_iters, int)
    assert isinstance(config.weight_decay, float)


def _eval_config(model: str) -> str:
    return f"init_from = '{model}'" + "\nbatch_size=8; eval_iters=500; eval_only=True; wandb_log=False"


NANOGPTS_SEVEN = {
    **{model: (_eval_config(model), dict(init_from=model, n_layer=layers, n_head=heads, n_embd=width, bias=True,
                                         vocab_size=50257, batch_size=8, eval_iters=500, eval_only=True))
       for model, layers, heads, width in (("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024),
                                           ("gpt2-large", 36, 20, 1280), ("gpt2-xl", 48, 25, 1600))},
    "finetune_shakespeare": ("""
import time
wandb_log = False
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())
learning_rate = 3e-5; decay_lr = False
max_iters = 20; batch_size = 1; gradient_accumulation_steps = 32
always_save_checkpoint = False
init_from = 'gpt2-xl'
dataset = 'shakespeare'; out_dir = 'out-shakespeare'
eval_interval = 5; eval_iters = 40
""", dict(learning_rate=3e-5, decay_lr=False, max_iters=20, batch_size=1, gradient_accumulation_steps=32,
          always_save_checkpoint=False, n_layer=48, bias=True, vocab_size=50257, dataset="shakespeare")),
    "train_gpt2": ("""
max_iters = 600000; lr_decay_iters = 600000
batch_size = 12; block_size = 1024; gradient_accumulation_steps = 5 * 8
wandb_log = True; wandb_project = 'owt'
wandb_run_name='gpt2-124M'
weight_decay = 1e-1
eval_interval = 1000; eval_iters = 200; log_interval = 10
""", dict(gradient_accumulation_steps=40, wandb_log=True, wandb_run_name="gpt2-124M", log_interval=10, n_layer=12,
          vocab_size=0, bias=False)),
    "train_shakespeare_char": ("""
n_layer = n_head = 6; n_embd = 384; dropout = 0.2
dataset = 'shakespeare_char'; out_dir = 'out-shakespeare-char'
gradient_accumulation_steps = 1; batch_size = 64; block_size = 256
learning_rate = 1e-3; max_iters = 5000; lr_decay_iters = 5000; min_lr = 1e-4; beta2 = 0.99; warmup_iters = 100
eval_interval = 250; eval_iters = 200; log_interval = 10
always_save_checkpoint = False
wandb_log = False; wandb_project = 'shakespeare-char'; wandb_run_name = 'mini-gpt'
""", dict(n_embd=384, dropout=0.2, block_size=256, beta2=0.99, always_save_checkpoint=False, min_lr=1e-4)),
}


@pytest.mark.parametrize("name", NANOGPTS_SEVEN)
def test_nanogpts_own_config_files_mean_the_same(tmp_path: Path, name: str) -> None:
    text, expected = NANOGPTS_SEVEN[name]
    config = config_of(tmp_path, text)
    assert {key: getattr(config, key) for key in expected} == expected
    if name == "finetune_shakespeare":
        assert float(config.wandb_run_name.removeprefix("ft-")) > 1.7e9


# ---- configs that fitgpt comes with


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt2_124m.py", "config/gpt2_124m.py"])
def test_a_config_of_fitgpt_is_found_in_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_from(walk([name], RunConfig))[0].batch_size == 12


def test_a_file_of_the_user_comes_before_one_of_fitgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2_124m.py").write_text("n_layer = 3\n")
    assert config_from(walk(["gpt2_124m.py"], RunConfig))[0].n_layer == 3
    with pytest.raises(UsageError, match="There is no config file 'elsewhere"):
        walk(["elsewhere/gpt2_124m.py"], RunConfig)
