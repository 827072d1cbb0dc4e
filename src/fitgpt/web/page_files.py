"""The page's files by their path: HTML, scripts, styles, words. `fitgpt serve` and the static site have the same."""

from __future__ import annotations

import json
from pathlib import Path

from ..show import charts

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
               ".json": "application/json", ".md": "text/plain"}


def page_files() -> dict[str, bytes]:
    files = {f"static/{path.name}": path.read_bytes() for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES}
    return files | {"index.html": files.pop("static/index.html"),
                    "static/strings.json": json.dumps(catalogues(), ensure_ascii=False).encode(),
                    "static/charts.css": charts.style().encode(), "static/charts.js": charts.script().encode()}


def catalogues() -> dict[str, dict[str, str]]:
    """The page's words by language: every file of static/strings."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(STATIC.glob("strings/*.json"))}
