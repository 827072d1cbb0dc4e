"""`prepare --hub` with the real `datasets` library, from a hub on 127.0.0.1 whose dataset has FineWeb's layout."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from fitgpt.commands.main import main
from fitgpt.core.errors import DataError
from tests.data.hub_server import HubServer

pytestmark = [pytest.mark.ci, pytest.mark.skipif(find_spec("datasets") is None, reason=(
    "needs the package datasets: pip install -e '.[datasets]'"))]
SRC = Path(__file__).parents[2] / "src"
NAME, CONFIG, FILES, ROWS = "HuggingFaceFW/fineweb", "sample-10BT", 3, 400
SETTINGS = ("--tokenizer=bytes", "--val_fraction=0.02", "--shard_tokens=100k")
README = """---
configs:
- config_name: default
  data_files: [{split: train, path: data/*/*}]
- config_name: sample-10BT
  data_files: [{split: train, path: sample/10BT/*}]
---
"""
# `fitgpt` without waiting before a retry (up to 8 s each, minutes in all), and with marks at each row group.
FITGPT = """
import sys, time
time.sleep = lambda _: None
from fitgpt.__main__ import main
from fitgpt.data import sources
sources.ROWS_PER_MARK = 100
sys.exit(main())
"""


def parquet(number: int) -> bytes:
    """A file with the columns of FineWeb, in row groups of 100."""
    import pyarrow
    from pyarrow import parquet

    rng, rows = random.Random(number), range(number * ROWS, (number + 1) * ROWS)
    texts = [" ".join(f"word{rng.randrange(500)}" for _ in range(rng.randrange(20, 200))) for _ in rows]
    table = pyarrow.table({
        "text": texts, "id": [f"<urn:uuid:{row:08}>" for row in rows], "dump": ["CC-MAIN-2013-20"] * ROWS,
        "url": [f"http://example.com/{row}" for row in rows], "date": ["2013-05-18T05:48:54Z"] * ROWS,
        "file_path": ["s3://commoncrawl/crawl-data/x.warc.gz"] * ROWS, "language": ["en"] * ROWS,
        "language_score": [0.94] * ROWS, "token_count": [len(text) // 4 for text in texts]})
    file = io.BytesIO()
    parquet.write_table(table, file, row_group_size=100)
    return file.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {f"sample/10BT/{number:03}_00000.parquet": parquet(number) for number in range(FILES)}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[HubServer]:
    server = HubServer(NAME, {"README.md": README.encode(), "data/CC-MAIN-2013-20/000_00000.parquet": b"", **files})
    yield server
    server.close()


@pytest.fixture(scope="module")
def expected(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards of the same parquet files, read from the disk."""
    folder = tmp_path_factory.mktemp("local")
    for name, content in files.items():
        (folder / Path(name).name).write_bytes(content)
    assert main(["prepare", str(folder), f"--out={folder / 'out'}", *SETTINGS]) == 0
    return shards(folder / "out")


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def prepare(hub: HubServer, folder: Path) -> subprocess.CompletedProcess[str]:
    """`fitgpt prepare --hub` in a process of its own: the address of the hub is read when its library is imported."""
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(folder.parent / "cache"),
                   "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-c", FITGPT, "prepare", f"--hub={NAME}", f"--hub_config={CONFIG}",
                           f"--out={folder}", *SETTINGS, "--yes"],
                          env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_connection_lost_in_the_middle_of_a_file_is_retried_with_a_message(
        hub: HubServer, files: dict[str, bytes], expected: dict[str, bytes], tmp_path: Path) -> None:
    hub.lose_after, hub.losses = 2 * len(next(iter(files.values()))), 4
    done = prepare(hub, tmp_path / "out")
    assert (done.returncode, hub.lost) == (0, 4), done.stderr
    assert "Retrying in" in done.stderr
    assert shards(tmp_path / "out") == expected


def test_a_lost_hub_ends_prepare_and_the_same_command_resumes_to_the_same_shards(
        hub: HubServer, files: dict[str, bytes], expected: dict[str, bytes], tmp_path: Path) -> None:
    hub.lose_after, hub.losses = sum(map(len, files.values())) * 4 // 3, 10**9  # in the last file
    stopped = prepare(hub, tmp_path / "out")
    assert stopped.returncode == DataError.exit_code, stopped.stderr
    assert "tokens are kept in" in stopped.stderr
    assert "run the same command again: it resumes" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    hub.losses = 0
    hub.requests.clear()
    resumed = prepare(hub, tmp_path / "out")
    assert resumed.returncode == 0, resumed.stderr
    assert "Resuming an earlier `prepare` after" in resumed.stdout
    assert shards(tmp_path / "out") == expected
    read_from_the_start = {name for name, first in hub.requests if first < 100}  # not only the schema at its end
    assert min(files) not in read_from_the_start
