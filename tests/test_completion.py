"""Shells complete every verb and every flag: bash is asked for real, fish's script is read."""

from __future__ import annotations

import subprocess
import sys
from shutil import which

import pytest

from fitgpt.commands.completion import bash, fish
from fitgpt.commands.main import VERBS, main, options_of
from fitgpt.config.fields import knobs_of


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    script = (f"{bash()}\nCOMP_WORDS=(fitgpt {' '.join(words)}); COMP_CWORD={len(words)}; _fitgpt; "
              'echo "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


needs_bash = pytest.mark.skipif(which("bash") is None, reason="there is no bash here")


@needs_bash
def test_bash_completes_verbs() -> None:
    assert completed("pla") == ["plan"]
    assert set(completed("''")) == set(VERBS)


@needs_bash
@pytest.mark.parametrize("verb", VERBS)
def test_bash_completes_every_flag_of_a_verb(verb: str) -> None:
    for name, knob in knobs_of(options_of(VERBS[verb])).items():
        assert (f"--{name}" if knob.kind == "bool" else f"--{name}=") in completed(verb, f"--{name[:3]}")


@needs_bash
@pytest.mark.parametrize("words", [("--trainer", "=", "n"), ("--trainer=n",)])
def test_bash_completes_the_values_that_a_flag_takes(words: tuple[str, ...]) -> None:
    assert completed("plan", *words) == ["nanogpt" if len(words) > 1 else "--trainer=nanogpt"]
    assert completed("plan", "--trainer", "=") == ["fitgpt", "nanogpt"]  # auto is explain's alone
    assert completed("train", "--bias", "=") == ["True", "False"]
    assert completed("train", "--compile", "=") == ["auto", "True", "False"]


@needs_bash
def test_bash_completes_files_where_no_flag_is_meant() -> None:
    assert "pyproject.toml" in completed("train", "pyproj")


def test_fish_is_told_every_verb_and_flag() -> None:
    script = fish()
    for verb in VERBS.values():
        assert f" -a {verb.name} " in script
        for name in knobs_of(options_of(verb)):
            assert f"'__fish_seen_subcommand_from {verb.name}' -l {name}" in script


def test_zsh_reads_the_bash_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("autoload -U +X bashcompinit")
    assert bash() in printed


def test_printing_it_loads_no_torch() -> None:
    script = ("import sys; from fitgpt.commands.main import main; main(['completion'])\n"
              "assert not {'torch', 'numpy'} & set(sys.modules)")
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0
