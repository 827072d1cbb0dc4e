"""How many tokens per second does `fitgpt prepare` write? On English text in parquet files with FineWeb's columns.

    python bench/prepare_speed.py -o bench/results/prepare_speed.json

The text is 10 MB of docstrings of the standard library and of the installed packages, one document per module, eight
times over, tokenized by GPT-2's tokenizer; set TIKTOKEN_CACHE_DIR where there is no network. With one process and with
one per core, the best of several runs, the start included. Tokens per CPU second (of all processes) is the figure to
quote where others use the machine too. Reading from the hub also needs the time of the download.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from fitgpt import __version__  # noqa: E402
from fitgpt.data.pipeline import available_cores  # noqa: E402
from fitgpt.data.shards import SPLITS, read_manifest  # noqa: E402

TEXT_BYTES, TIMES = 10_000_000, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("-o", "--out", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = TIMES * list(docstrings(TEXT_BYTES))
        write_parquet(Path(folder) / "text.parquet", texts)
        rows = [speed(Path(folder), processes, options.repeats) for processes in sorted({1, available_cores()})]
    for row in rows:
        print(f"{row['processes']} processes: {row['tokens_per_s']:,} tokens/s, "
              f"{row['tokens_per_cpu_s']:,} per CPU second")
    Path(options.out).write_text(json.dumps(
        {"what": "tokens per second of `fitgpt prepare --tokenizer=gpt2`, from parquet files with FineWeb's columns",
         "text": {"what": "docstrings of the standard library and of installed packages, 8 times over",
                  "documents": len(texts),
                  "bytes": sum(len(text.encode()) for text in texts)},
         "date": time.strftime("%Y-%m-%d"), "cpu": cpu(), "cores": available_cores(),
         "load": round(os.getloadavg()[0] / available_cores(), 1), "fitgpt": __version__,
         "python": platform.python_version(), "tiktoken": version("tiktoken"), "pyarrow": version("pyarrow"),
         "command": "python bench/prepare_speed.py -o bench/results/prepare_speed.json", "rows": rows},
        indent=1) + "\n", encoding="utf-8")


def speed(folder: Path, processes: int, repeats: int) -> dict[str, Any]:
    runs = [prepare(folder, processes) for _ in range(repeats)]
    seconds, cpu_seconds = (min(run[key] for run in runs) for key in ("seconds", "cpu_seconds"))
    return {"processes": processes, "tokens_per_s": round(runs[0]["tokens"] / seconds),
            "tokens_per_cpu_s": round(runs[0]["tokens"] / cpu_seconds), "runs": runs}


def prepare(folder: Path, processes: int) -> dict[str, Any]:
    """The whole command, timed from outside."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = ["prepare", str(folder / "text.parquet"), f"--out={folder / 'tokens'}", f"--processes={processes}"]
    subprocess.run([sys.executable, "-m", "fitgpt", *command, "--overwrite"], check=True,
                   stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    manifest = read_manifest(folder / "tokens")
    return {"tokens": sum(manifest.tokens(split) for split in SPLITS), "seconds": round(seconds, 2),
            "cpu_seconds": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 2)}


def docstrings(nbytes: int) -> Iterator[str]:
    """Of each module its docstrings, at least 1,000 characters of them, up to this many bytes in all."""
    roots = dict.fromkeys(Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib"))
    warnings.simplefilter("ignore")  # of invalid escapes in their code
    seen = set[str]()
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        found = [ast.get_docstring(node) or "" for node in ast.walk(tree)
                 if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        text = "\n\n".join(filter(None, found))
        if len(text) >= 1000 and text not in seen:
            seen.add(text)
            nbytes -= len(text)
            yield text.encode(errors="replace").decode()
        if nbytes < 0:
            return


def write_parquet(path: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    count = len(texts)
    columns = {"text": texts, "id": [f"<urn:uuid:{number:08}>" for number in range(count)],
               "dump": ["CC-MAIN-2013-20"] * count, "url": ["http://example.com"] * count,
               "date": ["2013-05-18T05:48:54Z"] * count, "file_path": ["s3://commoncrawl/x"] * count,
               "language": ["en"] * count, "language_score": [0.9] * count, "token_count": [1000] * count}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=1000)


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
