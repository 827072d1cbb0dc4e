"""Generate the parts of the docs that come from the code, from recorded results and from real runs.

    python tools/docs.py --check             lists the pages that differ, and fails if any does
    python tools/docs.py --write             brings them up to date
    python tools/docs.py --record [NAME …]   runs the commands of docs/transcripts/NAME.txt again, then writes

A page marks such a part with `<!-- generated: KIND ARGUMENTS -->` and `<!-- /generated -->`; the kinds are in PARTS.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import bench_tables  # noqa: E402
import memory_page  # noqa: E402
import real_messages  # noqa: E402
import reliability_tables  # noqa: E402
import traces  # noqa: E402
from fitgpt.commands.main import find_command, overview  # noqa: E402
from fitgpt.config.argv import help_text, markdown_table  # noqa: E402
from fitgpt.config.command_options import COMMANDS  # noqa: E402
from fitgpt.config.memory_savers import SAVERS, Saver  # noqa: E402
from fitgpt.config.optimizers import OPTIMIZERS  # noqa: E402
from fitgpt.config.run_config import FROZEN_ON_RESUME  # noqa: E402
from fitgpt.diagnosis.case import Case  # noqa: E402
from fitgpt.diagnosis.oom_message import OomMessage  # noqa: E402
from fitgpt.diagnosis.rules import RULES, SMALLER_BATCH  # noqa: E402

DOCS = ROOT / "docs"
TRANSCRIPTS = DOCS / "transcripts"
RESULTS = ROOT / "bench" / "results"
COLUMNS = "80"
MARKED = re.compile(r"(<!-- generated: (\w+)([^\n]*?) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


def rendered(page: str) -> str:
    """The page with each of its generated parts as it should be."""
    return MARKED.sub(lambda found: f"{found[1]}{PARTS[found[2]](*found[3].split())}{found[4]}", page)


def stale() -> list[Path]:
    return [path for path in pages() if rendered(text := path.read_text(encoding="utf-8")) != text]


# ---- from the code

def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def help_part(command: str = "") -> str:
    with patch.dict(os.environ, COLUMNS=COLUMNS):
        return fenced(help_text(find_command(command)) if command else overview())


def options_part(command: str) -> str:
    return markdown_table(COMMANDS[command].own or COMMANDS[command])  # the rest is train's


def tree_part() -> str:
    """Every file of the package with the first sentence of its docstring."""
    package = ROOT / "src" / "fitgpt"
    lines = ["src/fitgpt/"]
    for file in sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name)):
        folders = file.relative_to(package).parts[:-1]
        if file.name == "__init__.py" and folders:
            lines.append(_tree_line("  " * len(folders), f"{folders[-1]}/", file))
        elif not file.name.startswith("__"):
            lines.append(_tree_line("  " * (len(folders) + 1), file.name, file))
    return fenced("\n".join(lines))


def _tree_line(indent: str, name: str, file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?])\s", paragraph)[0].removesuffix(".")
    return f"{indent}{name}".ljust(26) + sentence


def configs_part() -> str:
    rows = [f"| [`{path.relative_to(ROOT)}`](../{path.relative_to(ROOT)}) | {_first_comment(path)} |"
            for path in sorted((ROOT / "config").glob("*.py"))]
    return "\n".join(["| file | what it trains |", "|---|---|", *rows]) + "\n"


def _first_comment(path: Path) -> str:
    return path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("#").strip()


def savers_part() -> str:
    rows = [f"| `--{one.setting}` | {'exact' if one.exact else 'lossy'} | {one.saves} | "
            f"{one.costs} | {_requirements(one) or '–'} |" for one in SAVERS]
    return "\n".join(["| flag | | what is not held | what it costs | needs |", "|---|---|---|---|---|", *rows]) + "\n"


def _requirements(saver: Saver) -> str:
    """As text: "optimizer=adamw or adam8bit, offload=none"."""
    own = list(map(str, saver.requires))
    if saver.option == "optimizer":
        own += map(str, OPTIMIZERS[saver.value].requires)
    others = [f"not optimizer={name}" for name, spec in OPTIMIZERS.items() for each in spec.requires
              if each.option == saver.option and saver.value not in each.values]
    return ", ".join(own + others)


def rules_part() -> str:
    """A section for each cause that `fitgpt explain` knows, with what it calls for besides a smaller micro-batch."""
    nothing_known, usual = Case(OomMessage("cuda", "", "")), {todo for todo, _ in SMALLER_BATCH}
    sections = []
    for rule in RULES:
        todo = "".join(f"- **{todo}**: {effect}.\n" for todo, effect in rule.advice_for(nothing_known)
                       if todo not in usual)
        sections.append(f"### {rule.code} {rule.title}\n\n*Shown by*: {rule.pattern}.\n\n{rule.background}\n"
                        + (f"\n{todo}" if todo else ""))
    return "\n".join(sections)


def frozen_part() -> str:
    return ", ".join(f"`{name}`" for name in sorted(FROZEN_ON_RESUME)) + ".\n"


# ---- from real runs

def transcript_part(name: str, which: str = "") -> str:
    """A recorded transcript: all of it, or with "first" its first command and the answer."""
    text = (TRANSCRIPTS / f"{name}.txt").read_text(encoding="utf-8")
    return fenced(text.split("\n\n$ ")[0] if which == "first" else text)


def record(names: list[str]) -> None:
    """Runs each `$ command` of the transcripts in one new folder, in order, and keeps what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "config").symlink_to(ROOT / "config")
        (home / "examples").symlink_to(DOCS / "examples")
        (home / "docs").mkdir()
        (home / "docs" / "examples").symlink_to(DOCS / "examples")
        (home / "recorded").symlink_to(ROOT / "tests" / "recorded")
        (home / "my_texts").mkdir()
        for page in pages():
            shutil.copy(page, home / "my_texts" / f"{page.stem}.txt")
        for name in names:
            file = TRANSCRIPTS / f"{name}.txt"
            commands = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("$ ")]
            blocks = [f"{command}\n{_output(command[2:], home)}".rstrip() for command in commands]
            file.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
            print(f"recorded {file.relative_to(ROOT)}", flush=True)


def _output(command: str, home: Path) -> str:
    """What it prints, and how it ends if not well. `# Ctrl-C after 8 s` in a command is done."""
    environment = {**os.environ, "COLUMNS": COLUMNS, "PYTHONPATH": str(ROOT / "src"),
                   "FITGPT_HOME": str(home / ".fitgpt"),  # never the measured speeds of whoever records
                   "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    running = subprocess.Popen(["bash", "-c", f"exec 2>&1; {command}"], cwd=home, env=environment, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    asked = re.search(r"# Ctrl-C after (\d+) s", command)
    try:
        printed, _ = running.communicate(timeout=int(asked[1]) if asked else 600)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGINT)
        printed, _ = running.communicate(timeout=60)
    ending = f"(exit code {running.returncode})\n" if running.returncode else ""
    for prefix in (sys.prefix, sysconfig.get_config_var("prefix")):  # a virtual environment's, and its Python's
        printed = printed.replace(prefix, "/usr")
    return printed + ending


PARTS: dict[str, Callable[..., str]] = {
    "help": help_part, "options": options_part, "tree": tree_part, "configs": configs_part, "savers": savers_part,
    "frozen": frozen_part, "rules": rules_part, "transcript": transcript_part,
    **memory_page.PARTS, **bench_tables.PARTS, **real_messages.PARTS, **reliability_tables.PARTS, **traces.PARTS,
}
# In the order in which they are recorded: later ones use what earlier ones made.
TRANSCRIPT_ORDER = ("plan", "plan_options", "trace", "fit", "fit_lossy", "fit_goal", "cards", "explain",
                    "explain_reading", "explain_short", "explain_snapshot", "prepare", "demo", "watch", "doctor",
                    "train", "sample", "eval", "export", "errors", "python")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    action.add_argument("--record", nargs="*", metavar="NAME", choices=TRANSCRIPT_ORDER)
    options = parser.parse_args()
    if options.record is not None:
        record(options.record or list(TRANSCRIPT_ORDER))
    found = stale()
    if options.check:
        for path in found:
            print(f"{path.relative_to(ROOT)} is not what the code and the results say: python tools/docs.py --write")
        return int(bool(found))
    for path in found:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
