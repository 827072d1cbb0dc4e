"""Helpers of the tests that read documents from a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fitgpt.config.command_options import PrepareOptions
from fitgpt.core.errors import DataError
from fitgpt.data.sources import TextSource, open_source
from fitgpt.data.text import TextChunk


def files(*paths: object, column: str = "text") -> TextSource:
    return open_source(PrepareOptions(input=tuple(map(str, paths)), text_column=column))


def documents(source: TextSource, first: int = 0) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for chunk in source.chunks(first):
        found[chunk.document] = found.get(chunk.document, b"") + chunk.data
    return found


def counts(chunks: Iterator[TextChunk]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for chunk in chunks:
        total.update(chunk.counts)
    return dict(total)


def reject(*paths: object, column: str = "text") -> DataError:
    with pytest.raises(DataError) as raised:
        list(files(*paths, column=column).chunks(0))
    assert raised.value.exit_code == 3
    assert raised.value.fix
    return raised.value


def write(name: str, content: bytes | str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path
