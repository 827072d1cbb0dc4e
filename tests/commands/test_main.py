"""The command line: commands, exit codes, what reaches stderr, and what is never imported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fitgpt
from fitgpt.commands import main as cli
from fitgpt.commands.main import EXTRAS, main, overview
from fitgpt.config.command_options import COMMANDS
from fitgpt.core import errors


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Every command's function replaced by one that stores its argument."""
    got: dict[str, Any] = {}
    monkeypatch.setattr(cli, "load", lambda command: lambda given: got.__setitem__(command, given))
    return got


def target_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(given: object) -> int:
        raise error

    monkeypatch.setattr(cli, "load", lambda command: fail)


def fitgpt_process(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **more}
    return subprocess.run([sys.executable, "-m", "fitgpt", *argv], text=True, **pipes)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


# ---- help and version


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert all(f"  {name} " in out for name in COMMANDS)
    assert err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_works_among_invalid_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for argv in (["help", command], [command, "--help"], [command, "--no-such-flag", "-h"],
                 [command, "nowhere.py", "--help"]):
        if command == "trace" and argv[1] == "nowhere.py":
            continue  # what follows the script's name is the script's
        assert main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith(f"usage: fitgpt {command}")
    assert len(set(texts)) == 1


def test_help_after_two_dashes_is_positional(called: dict[str, Any],
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--", "--help"]) == 0
    assert called["prepare"].input == ("--help",)
    assert main(["prepare", "--help", "--", "x"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_in_the_help_are_valid(command: str, called: dict[str, Any],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    import shlex

    monkeypatch.chdir(Path(__file__).parents[2])
    for example in COMMANDS[command].examples:
        argv = shlex.split(example)
        assert argv[:2] == ["fitgpt", command]
        assert main(argv[1:]) == 0, example


@pytest.mark.parametrize("argv", [["--version"], ["-V"], ["version"]])
def test_version_is_that_of_the_package(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out == f"fitgpt {fitgpt.__version__}\n"


@pytest.mark.parametrize(("argv", "fix"), [
    (["trian"], "fitgpt train"), (["smaple"], "fitgpt sample"), (["xyzzy"], "--help"), (["help", "evl"], "fitgpt eval"),
    (["config/x.py"], "fitgpt train config/x.py"), (["--batch_size=8"], "fitgpt train --batch_size=8"),
    ([""], "--help"), (["train.py", "config/x.py"], "fitgpt train"),
    (["resume", "runs/a"], "fitgpt train --resume --out_dir=RUN"), (["generate"], "fitgpt sample"),
])
def test_an_unknown_command_gets_the_nearest_as_fix(argv: list[str], fix: str,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fitgpt: ")
    assert f"\n  {fix}" in err or fix in err.splitlines()[-1]


# ---- what a command is called with


def test_train_is_given_the_assignments_in_order(called: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "c.py"
    file.write_text("batch_size = 4\n")
    assert main(["train", "--n_layer=2", str(file), "--batch_size=12", "--resume"]) == 0
    assert called["train"] == [("n_layer", 2, "--n_layer=2"), ("batch_size", 4, f"{file}:1"),
                               ("batch_size", 12, "--batch_size=12"), ("init_from", "resume", "--resume")]


def test_other_commands_are_given_their_options(called: dict[str, Any], tmp_path: Path) -> None:
    train_config = tmp_path / "c.py"
    train_config.write_text("out_dir = 'runs/x'\nn_layer = 3\ncompile = 'auto'\n")
    assert main(["sample", str(train_config), "--start=hi"]) == 0
    assert (called["sample"].out_dir, called["sample"].start) == ("runs/x", "hi")
    assert main(["prepare", "notes.py", "texts"]) == 0
    assert called["prepare"].input == ("notes.py", "texts")
    assert main(["eval", "runs/x"]) == main(["export", "runs/x", "-o", "y"]) == main(["demo"]) == 0
    assert (called["eval"].run, called["export"].out, called["demo"].out_dir) == ("runs/x", "y", "runs/demo")


def test_the_exit_code_is_what_the_function_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "load", lambda command: lambda options: 75)
    assert main(["demo"]) == 75


@pytest.mark.parametrize("argv", [
    ["train", "--learnig_rate=1"], ["train", "nowhere.py"], ["train", "--learning_rate=nan"], ["train", "--batch_size"],
    ["train", "--temperature=1"], ["eval"], ["export", "x"], ["prepare"], ["demo", "x"], ["sample", "a", "b"],
])
def test_a_usage_error_exits_with_2_and_prints_one_paragraph(argv: list[str],
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fitgpt: ")
    assert "Traceback" not in err
    assert all(line.startswith("  ") for line in err.splitlines()[1:])
    assert len(err.splitlines()) <= 3


def test_an_error_is_wrapped_to_the_terminal_and_its_fix_is_not(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["train", "--n_head=7"]) == 2
    *what, fix = capsys.readouterr().err.splitlines()
    assert len(what) > 3
    assert max(map(len, what)) <= 60
    assert all(line.startswith(" " * 8) for line in what[1:])
    assert fix == "  --n_head=6 or --n_head=8 or --n_embd=728 or --n_embd=784"
    monkeypatch.delenv("COLUMNS", raising=False)  # a log file
    assert main(["train", "--n_head=7"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_an_option_of_another_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--temperature=1"])
    assert "It is an option of `fitgpt sample`." in capsys.readouterr().err


# ---- every error has its exit code


@pytest.mark.parametrize(("error", "code"), [
    (errors.DoesNotFit("w", "f"), 1), (errors.UsageError("w", "f"), 2), (errors.DataError("w", "f"), 3),
    (errors.CheckpointError("w", "f"), 4), (errors.DeviceError("w", "f"), 5), (errors.NumericsError("w", "f"), 6),
    (errors.SystemFault("w", "f"), 7), (errors.Interrupted("w", "f"), 75), (errors.FitError("w", "f"), 70),
])
def test_every_error_class_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                             error: errors.FitError, code: int) -> None:
    target_raises(monkeypatch, error)
    assert main(["demo"]) == code
    assert capsys.readouterr().err == "fitgpt: w\n  f\n"


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target_raises(monkeypatch, KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EMFILE])
def test_an_os_error_exits_with_7_and_names_the_file(monkeypatch: pytest.MonkeyPatch, number: int,
                                                     capfd: pytest.CaptureFixture[str]) -> None:
    target_raises(monkeypatch, OSError(number, os.strerror(number), "/some/file"))
    monkeypatch.setattr(cli, "_drop_stdout", lambda: None)
    assert main(["demo"]) == 7
    err = capfd.readouterr().err
    assert err.startswith(f"fitgpt: /some/file: {os.strerror(number)}.")


def test_a_memory_error_exits_with_7(monkeypatch: pytest.MonkeyPatch) -> None:
    target_raises(monkeypatch, MemoryError())
    assert main(["demo"]) == 7


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_package_gets_its_extra_as_fix(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str) -> None:
    target_raises(monkeypatch, ModuleNotFoundError("No module", name=f"{package}.sub"))
    assert main(["demo"]) == 2
    assert f"pip install -e '.[{EXTRAS[package]}]'" in capsys.readouterr().err


def test_the_extras_exist_in_pyproject() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        assert any(each.startswith(package) for each in project["optional-dependencies"][extra])


def test_every_requirement_of_every_extra_is_pinned() -> None:
    """And what these require in turn, as far as it is installed here."""
    import tomllib
    from contextlib import suppress
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    pinned = {canonicalize_name(line.partition("==")[0]) for line in (root / "constraints.txt").read_text().split()}
    waiting = [Requirement(each) for group in (project["dependencies"], *project["optional-dependencies"].values())
               for each in group]
    seen, missing = set[str](), set[str]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if str(wanted) in seen or not (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(wanted))
        missing |= {name} - pinned
        with suppress(PackageNotFoundError):
            waiting += [Requirement(each) for each in requires(name) or ()]
    assert not missing


def test_a_torch_that_does_not_load_is_a_device_error(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    target_raises(monkeypatch, ImportError("libcudart.so.12: cannot open", name="torch._C"))
    assert main(["demo"]) == 5
    assert "libcudart" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ModuleNotFoundError("y", name="fitgpt.nope"), KeyError("k")])
def test_a_bug_exits_with_70_and_writes_a_report(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("FITGPT_DEBUG", raising=False)
    target_raises(monkeypatch, error)
    assert main(["demo"]) == 70
    err = capsys.readouterr().err
    (report,) = tmp_path.glob("fitgpt-bug-*.txt")
    assert "a bug in fitgpt" in err
    assert str(report) in err
    assert "Traceback" not in err
    assert "Traceback" in report.read_text()
    assert "argv: ['demo']" in report.read_text()


def test_a_bug_prints_its_traceback_with_fitgpt_debug_or_without_a_file(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target_raises(monkeypatch, ZeroDivisionError("x"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FITGPT_DEBUG", "1")
    assert main(["demo"]) == 70
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.delenv("FITGPT_DEBUG")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert main(["demo"]) == 70
    assert "Traceback" in capsys.readouterr().err


# ---- as a process


@pytest.mark.parametrize("buffered", [True, False])
def test_a_closed_pipe_exits_with_141_and_no_traceback(buffered: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = fitgpt_process("train", "--help", stdout=writer, env=environment(PYTHONUNBUFFERED="" if buffered else "1"))
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_for_stdout_exits_with_7(buffered: bool) -> None:
    with open("/dev/full", "w") as full:
        done = fitgpt_process("--help", stdout=full, env=environment(PYTHONUNBUFFERED="" if buffered else "1"))
    assert done.returncode == 7
    assert done.stderr.startswith("fitgpt: No space left on device.")
    assert "Exception" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize(("command", "code"), [
    ("--help >&-", 0), ("--help 2>&-", 0), ("--help <&-", 0), ("--help >&- 2>&-", 0), ("nothing 2>&-", 2)])
def test_closed_streams_are_no_error(command: str, code: int) -> None:
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m fitgpt {command}"], capture_output=True, timeout=60)
    assert done.returncode == code


def test_without_stderr_messages_do_not_reach_stdout(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(options: Any) -> int:
        print("a remark", file=sys.stderr)
        return int(sys.stderr.isatty())

    monkeypatch.setattr("fitgpt.commands.main.load", lambda place: command)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["cards"]) == 0
    assert capsys.readouterr().out == ""


def test_the_list_of_commands_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, overview().splitlines())) <= 80


def test_help_works_in_an_ascii_terminal_without_columns() -> None:
    done = fitgpt_process("train", "--help", env=environment(PYTHONIOENCODING="ascii", COLUMNS="0"))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_argument_that_is_not_utf8_is_a_usage_error() -> None:
    done = fitgpt_process("train", "--out_dir=" + os.fsdecode(b"\xff\xfe"))
    assert done.returncode == 2
    assert "broken byte" in done.stderr


def test_help_and_configs_load_neither_torch_nor_numpy() -> None:
    """Importing torch takes seconds: what answers at once must not."""
    config = Path(__file__).parents[2] / "config/train_fineweb.py"
    script = f"""
import sys
from fitgpt.commands.main import main
main(["--help"]); main(["train", "--help"]); main(["sample", "--help"]); main(["train", "--n_layr=3"])
from fitgpt.config.run_config import RunConfig, config_from
from fitgpt.config.argv import walk
config_from(walk([{str(config)!r}, "--batch_size=8"], RunConfig))[0].gpt_config()
heavy = {{"torch", "numpy", "rich", "pyarrow", "asyncio"}} & set(sys.modules)
sys.exit(f"loaded: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
