"""Shells complete every command and option: bash runs its script, the script of fish is read."""

from __future__ import annotations

import subprocess
import sys
from shutil import which

import pytest

from fitgpt.commands.completion import bash, fish
from fitgpt.commands.main import main
from fitgpt.config.argv import listed_options
from fitgpt.config.command_options import COMMANDS
from fitgpt.config.fields import shown_flag


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    script = (f"{bash()}\nCOMP_WORDS=(fitgpt {' '.join(words)}); COMP_CWORD={len(words)}; _fitgpt; "
              'echo "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


needs_bash = pytest.mark.skipif(which("bash") is None, reason="there is no bash here")


@needs_bash
def test_bash_completes_commands() -> None:
    assert completed("pla") == ["plan"]
    assert set(completed("''")) == set(COMMANDS)


@needs_bash
@pytest.mark.parametrize("command", COMMANDS)
def test_bash_completes_every_option_of_a_command(command: str) -> None:
    for spec in listed_options(COMMANDS[command], everything=True):
        flag = shown_flag(spec)
        assert (flag if spec.kind == "bool" else f"{flag}=") in completed(command, flag[:5])


@needs_bash
@pytest.mark.parametrize("words", [("--trainer", "=", "n"), ("--trainer=n",)])
def test_bash_completes_the_values_of_an_option(words: tuple[str, ...]) -> None:
    assert completed("plan", *words) == ["nanogpt" if len(words) > 1 else "--trainer=nanogpt"]
    assert completed("plan", "--trainer", "=") == ["fitgpt", "nanogpt"]  # auto is explain's alone
    assert completed("train", "--bias", "=") == ["True", "False"]
    assert completed("train", "--compile", "=") == ["auto", "True", "False"]


@needs_bash
def test_bash_completes_file_names() -> None:
    assert "pyproject.toml" in completed("train", "pyproj")


def test_fish_completes_every_command_and_option() -> None:
    script = fish()
    for command, cls in COMMANDS.items():
        assert f" -a {command} " in script
        for spec in listed_options(cls, everything=True):
            assert f"'__fish_seen_subcommand_from {command}' -l {shown_flag(spec)[2:]}" in script


def test_zsh_reads_the_bash_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("autoload -U +X bashcompinit")
    assert bash() in printed


def test_completion_loads_no_torch() -> None:
    script = ("import sys; from fitgpt.commands.main import main; main(['completion'])\n"
              "assert not {'torch', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0
