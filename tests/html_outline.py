"""An HTML page as its tags, the data inside a chart, hostile text to put into pages, and their accessibility."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"input", "meta", "link", "br", "wbr", "line", "path", "rect", "circle"}
HOSTILE_TEXTS = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)",
                 "</script><b>", "<!--", "]]>", "&lt;b&gt;", "\x00\x1b[31m", "\ud800", "\u202e", "a\nb")


class Outline(HTMLParser):
    """Tags and their attributes in order; fails where one is left open or closed twice."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def elements(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags
                if name == tag and (not kind or kind in (attributes.get("class") or "").split())]


def chart_data(chart: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', chart)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def check_accessibility(page: Any, schemes: tuple[str, ...] = ("dark", "light")) -> None:
    """No violation of any rule of axe-core, in each colour scheme."""
    from axe_playwright_python.sync_playwright import Axe

    for scheme in schemes:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.wait_for_timeout(50)
        found = Axe().run(page)
        assert not found.response["violations"], found.generate_report()
