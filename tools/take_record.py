"""A record of a GPU, made by `fitgpt record`, in; the GPU's row in hardware/gpus.csv updated.

    python tools/take_record.py my-4070.json

Every run of the record is replayed. A record that no cuBLAS workspace and attention kernel explain is rejected, with
the figures that differ. An accepted one is kept in tests/recorded/gpus, where CI replays it, and its timed runs go to
src/fitgpt/planning/recorded.json.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import recorded
from fitgpt.core.errors import DataError, FitError
from fitgpt.hardware import gpus
from fitgpt.hardware.gpus import GpuModel
from fitgpt.planning.gpu_record import GpuRecord, parse
from fitgpt.planning.record_check import Explanation, cases, explain

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "fitgpt" / "hardware" / "gpus.csv"
KEPT = ROOT / "tests" / "recorded" / "gpus"
SHOWN = 12


def main(path: str) -> int:
    try:
        record = parse(Path(path).read_text(encoding="utf-8", errors="replace"), path)
        found = checked(record)
    except FitError as error:
        print(error)
        return error.exit_code
    except OSError as error:
        sys.exit(f"{path} cannot be read: {error.strerror}.")
    row = row_of(record, record.model)
    TABLE.write_text(updated(TABLE.read_text(encoding="utf-8"), row), encoding="utf-8")
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{re.sub(r'[^a-z0-9]+', '_', row.name.lower())}.json").write_text(record.to_json(), encoding="utf-8")
    recorded.main()
    print(f"{record.gpu.name}: {found.exact} of {len(found.figures)} figures to the byte. Its row:\n{row_text(row)}")
    return 0


def row_of(record: GpuRecord, before: GpuModel | None) -> GpuModel:
    """The row with the record's figures. Of memory seen before, the least usable and the most outside stay."""
    row = record.apply(before, "seen")
    if before and before.usable_src == "seen":
        row = replace(row, usable_mib=min(before.usable_mib or 0, row.usable_mib or 0))
    if before and before.outside_src == "seen":
        row = replace(row, outside_mib=max(before.outside_mib or 0, row.outside_mib or 0))
    return row


def checked(record: GpuRecord) -> Explanation:
    """How the record is explained; DataError if it is not, or if a GPU of that name has another size of memory."""
    namesake = gpus.match_device(record.gpu.name)
    if namesake and record.model is None:
        raise DataError(f"The record is rejected: memory of {record.gpu.driver_mib:,} MiB, and the {namesake.name} has "
                        f"{namesake.driver_mib:,}. If there is such a variant, add a row for it to gpus.csv first.")
    found = explain(record)
    if found.mismatches:
        listed = "\n  ".join(found.mismatches[:SHOWN])
        raise DataError(f"The record is rejected: no workspace and attention kernel explain it. With those that "
                        f"explain most, these figures differ ({len(found.mismatches)}):\n  {listed}")
    missing = {case.name for case in cases(found.platform)} - {run.name for run in record.runs}
    if missing:
        raise DataError(f"The record is not complete: {', '.join(sorted(missing))}.",
                        "fitgpt record with the same file continues it")
    return found


def updated(table: str, row: GpuModel) -> str:
    """The text of gpus.csv with the row in place of the one with its name, or at its end."""
    lines = table.splitlines()
    new = row_text(row)
    for number, line in enumerate(lines):
        if line.startswith(f"{row.name},"):
            lines[number] = new
            break
    else:
        lines.append(new)
    return "\n".join(lines) + "\n"


def row_text(row: GpuModel) -> str:
    """Memory sizes by a formula stay empty, and empty cells at the end are left out."""
    columns = next(line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    cells = []
    for column in columns.split(","):
        value = getattr(row, column)
        computed = column[:-4] in ("usable", "outside") and getattr(row, f"{column[:-4]}_src") == "formula"
        cells.append("" if value is None or computed else {True: "yes", False: "no"}[value] if isinstance(value, bool)
                     else f"{value:g}" if isinstance(value, float) else str(value))
    while cells and not cells[-1]:
        cells.pop()
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/take_record.py RECORD.json")
    gpus.load.cache_clear()
    sys.exit(main(sys.argv[1]))
