"""The docs against the code: generated parts, links, commands, messages, config files and exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fitgpt.commands import main as cli
from fitgpt.commands.main import BUG, OUTPUT_CLOSED, main
from fitgpt.config.argv import walk
from fitgpt.config.command_options import COMMANDS
from fitgpt.config.fields import Assignment, Options, build, option_specs
from fitgpt.config.run_config import RunConfig
from fitgpt.core import errors
from fitgpt.core.errors import STOPPED_AT_ONCE, FitError, UsageError
from fitgpt.planning.verdict import Verdict

ROOT = Path(__file__).parent.parent
NANOGPT_CONFIGS = ("train_gpt2", "train_shakespeare_char", "finetune_shakespeare", "eval_gpt2", "eval_gpt2_medium",
                   "eval_gpt2_large", "eval_gpt2_xl")


def load_tool() -> Any:
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_tool"] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()
PAGES: dict[str, str] = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in tool.pages()}
TRANSCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(tool.TRANSCRIPTS.glob("*.txt"))}


@pytest.fixture
def parse_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Commands only parse their options, in a folder with our config files and empty files named like nanoGPT's."""
    def load(command: str) -> Any:
        cls = COMMANDS[command]
        parts = (cls,) if cls.__bases__ == (Options,) else cls.__bases__
        return partial(check, parts) if issubclass(cls, RunConfig) else (lambda options: 0)

    def check(parts: tuple[type[Options], ...], assignments: list[Assignment]) -> None:
        for part in parts:
            build(part, [each for each in assignments if each.key in option_specs(part)])

    monkeypatch.setattr(cli, "load", load)
    monkeypatch.setenv("COLUMNS", tool.COLUMNS)  # errors are wrapped as in the transcripts
    shutil.copytree(ROOT / "config", tmp_path / "config")
    for name in NANOGPT_CONFIGS:
        (tmp_path / "config" / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)


# ---- generated parts


@pytest.mark.ci
@pytest.mark.timeout(900)  # replays every recorded run: three minutes on a busy machine
@pytest.mark.xdist_group("recorded")  # each run once per process
def test_generated_parts_are_up_to_date() -> None:
    assert [str(path.relative_to(ROOT)) for path in tool.stale()] == []


def test_an_outdated_part_is_found_and_rewritten() -> None:
    page = f"Before.\n<!-- generated: help demo -->\n{tool.help_part('demo')}<!-- /generated -->\nAfter.\n"
    assert tool.rendered(page) == page
    outdated = page.replace("--steps", "--stops")
    assert outdated != page
    assert tool.rendered(outdated) == page


def test_every_generated_part_is_closed_and_of_a_known_kind() -> None:
    for name, page in PAGES.items():
        opened = re.findall(r"^<!-- generated: (\w+)", page, re.MULTILINE)
        assert len(opened) == page.count("<!-- /generated -->") == len(tool.MARKED.findall(page)), name
        assert set(opened) <= set(tool.PARTS), name


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page_with_its_help_and_a_table_of_its_options(command: str) -> None:
    assert f"<!-- generated: help {command} -->" in PAGES[f"docs/{command}.md"]
    assert f"<!-- generated: options {command} -->" in PAGES["docs/config.md"]
    assert f"(docs/{command}.md)" in PAGES["README.md"]


def test_the_readme_has_at_most_200_lines() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 200


def test_every_transcript_is_recorded_and_shown() -> None:
    assert {f"{name}.txt" for name in tool.TRANSCRIPT_ORDER} == set(TRANSCRIPTS)
    shown = set(re.findall(r"<!-- generated: transcript (\w+)", "".join(PAGES.values())))
    assert shown == set(tool.TRANSCRIPT_ORDER)


def test_the_formula_of_nanogpts_peak_holds_for_every_recorded_eager_run() -> None:
    recorded = tool.memory_page.recorded_rows("nanogpt/models_30m_to_124m")
    eager = [row for row in recorded if not row["config"]["compile"]]
    assert len(eager) == 3
    for row in eager:
        total = sum(nbytes for _, _, nbytes in tool.memory_page.nanogpt_owners(row["config"]))
        assert abs(total / row["train_peak"] - 1) < 0.0015, row["name"]


# ---- links


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def links() -> Iterator[tuple[str, str]]:
    for name, page in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", page):
            if "://" not in target:
                yield name, target


def test_every_link_leads_to_an_existing_file_and_heading() -> None:
    broken = []
    for name, target in links():
        path, _, anchor = target.partition("#")
        file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        headings = {slug(line.lstrip("# ")) for line in PAGES.get(_page_name(file), "").splitlines()
                    if line.startswith("#")}
        if not file.exists() or (anchor and anchor not in headings):
            broken.append(f"{name}: {target}")
    assert broken == []
    assert sum(1 for _ in links()) > 30


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_named_in_the_guides_exists(page: str) -> None:
    """`planning/plan.py` and `planning/plan.plan_from` name files of the package, `tests/helpers.py` one outside it."""
    outside, not_yet = ("tests/", "bench/", "tools/", "docs/"), ("engine/optim/lion", "training/ranks")
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+)(\.[a-zA-Z_.]+)?`", FENCED.sub("", PAGES[page]))
    missing = []
    for path, suffix in named:
        folder = ROOT if path.startswith(outside) else ROOT / "src" / "fitgpt"
        if path not in not_yet and not any((folder / f"{path}{each}").exists() for each in (suffix, ".py")):
            missing.append(f"{path}{suffix}")
    assert missing == []
    assert len(named) > 15


def _page_name(file: Path) -> str:
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else ""


# ---- commands


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def commands_in(text: str) -> list[list[str]]:
    """Every `fitgpt command …` of a page, in a block or in a sentence. With … in it, it is no command; without options
    it is a name, and only its help is called."""
    lines = [part.strip().removeprefix("$ ") for block in FENCED.findall(text) for line in block.splitlines()
             for part in line.split("&&")]
    lines += [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
    commands = [shlex.split(line, comments=True)[1:] for line in lines
                if re.match(r"fitgpt [a-z-]", line) and "…" not in line]
    return [argv if len(argv) > 1 else [*argv, "--help"] for argv in commands]


def test_every_command_in_the_docs_is_accepted(parse_only: None, capsys: pytest.CaptureFixture[str]) -> None:
    found = 0
    for name, page in PAGES.items():
        for argv in commands_in(tool.MARKED.sub("", page)):
            found += 1
            assert main(argv) == 0, f"{name}: fitgpt {shlex.join(argv)}\n{capsys.readouterr().err}"
    assert found > 15


def test_errors_shown_in_transcripts_are_those_of_the_code(parse_only: None,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = 0
    for name, text in TRANSCRIPTS.items():
        for line in re.findall(r"^\$ (fitgpt .*)$", text, re.MULTILINE):
            capsys.readouterr()
            if main(shlex.split(line.partition(" | ")[0], comments=True)[1:]) != 0:
                mistakes += 1
                assert capsys.readouterr().err in text, f"{name}: {line}"
    assert mistakes >= 3


def test_transcripts_contain_no_paths_of_the_recording_machine_and_no_traceback() -> None:
    for text in TRANSCRIPTS.values():
        assert not re.search(r"/tmp/|/root/|/home/", text)
        assert "Traceback" not in text


# ---- config files in docs/config.md


def marked(name: str) -> str:
    found = re.search(rf"<!-- {name} -->(.*?)<!-- /{name} -->", PAGES["docs/config.md"], re.DOTALL)
    assert found is not None
    return found[1]


def test_the_config_file_in_the_docs_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "shown.py"
    file.write_text(marked("accepted").replace("```python", "").replace("```", ""), encoding="utf-8")
    config = build(RunConfig, walk([str(file)], RunConfig))
    assert (config.batch_size, config.max_iters, config.warmup_iters, config.min_lr) == (16, 9536, 476, 6e-4 / 10)
    assert config.wandb_run_name.startswith("run-16")


def test_config_lines_shown_as_errors_are_errors(tmp_path: Path) -> None:
    lines = re.findall(r"^\| `(.+?)` \|", marked("rejected"), re.MULTILINE)
    assert len(lines) == 8
    for line in lines:
        file = tmp_path / "rejected.py"
        file.write_text(f"{line}\n", encoding="utf-8")
        with pytest.raises(UsageError) as caught:
            walk([str(file)], RunConfig)
        assert "rejected.py:1" in caught.value.what, line


# ---- the notebook


NOTEBOOKS = {
    "quickstart": ("Fits: needs", "fits: True", "nanoGPT's train.py: False", "OOM-LOGITS", "the run is in runs/fox",
                   "the quick brown fox", "as nanoGPT counts, loss 5."),
    "colab": ("GPU: none; planned for a T4", "fitgpt on a T4", "Fits: needs", "float16", "def ", "model.safetensors"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_valid_and_its_cells_run(name: str, tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "docs" / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all({"id", "metadata", "source", "outputs", "execution_count"} <= cell.keys() for cell in cells)
    (tmp_path / "cells.py").write_text("\n".join("".join(cell["source"]) for cell in cells), encoding="utf-8")
    done = subprocess.run([sys.executable, "-P", "cells.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env=os.environ | {"FITGPT_NOTEBOOK": "tiny"})
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert [expected for expected in NOTEBOOKS[name] if expected not in printed] == []


# ---- exit codes


def exit_codes() -> set[int]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FitError)]
    return {0, BUG, OUTPUT_CLOSED, STOPPED_AT_ONCE, *(kind.exit_code for kind in (*kinds, *Verdict))}


def test_the_table_of_exit_codes_is_complete() -> None:
    table = re.findall(r"^\| (\d+) \|", PAGES["docs/errors.md"], re.MULTILINE)
    assert sorted(map(int, table)) == sorted(exit_codes())
