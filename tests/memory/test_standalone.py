"""The memory library needs nothing of fitgpt but its units: copied into an empty package, it works alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import fitgpt

SOURCE = Path(fitgpt.__file__).parent
LIBRARY = ("memory/tape.py", "memory/allocator.py", "memory/driver_addresses.py", "memory/timeline.py",
           "memory/platform.py", "core/units.py", "core/errors.py")
SCRIPT = """
import sys
from alone.memory.platform import Platform
from alone.memory.tape import Writer
from alone.memory.timeline import replay

writer = Writer()
writer.phase("load")
writer.alloc("weights", "weights", 100 << 20)
writer.phase("step")
with writer.span("forward"):
    writer.alloc("activations", "activations", 50 << 20)
writer.free("activations")
tape = writer.tape()
timeline = replay(tape)
assert (timeline.peak, timeline.reserved, timeline.needs) == (150 << 20, 150 << 20, 150 << 20)
assert timeline.owners_at(1) == {"weights": 100 << 20, "activations": 50 << 20}
assert replay(tape, expandable=True).needs <= replay(tape, expandable=True).reserved == 160 << 20
assert tape.span_costs()[0].peak == 50 << 20
assert Platform((8, 9)).attention(64, "bfloat16") == "flash"
assert not {"fitgpt", "torch", "numpy"} & set(sys.modules)
"""


def test_the_library_works_in_a_package_of_its_own(tmp_path: Path) -> None:
    for name in LIBRARY:
        target = tmp_path / "alone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / name, target)
    for folder in (tmp_path / "alone", tmp_path / "alone" / "memory", tmp_path / "alone" / "core"):
        (folder / "__init__.py").touch()
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env={}, capture_output=True, text=True,
                           timeout=60)
    assert ended.returncode == 0, ended.stderr
