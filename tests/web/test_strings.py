"""Each catalogue of the page's words has the keys that the page uses, with the same placeholders in every language."""

from __future__ import annotations

import re

import pytest

from fitgpt.memory.tape import OWNERS
from fitgpt.planning.fit_goals import GOALS
from fitgpt.runs.metrics import PHASES
from fitgpt.web.form import QUESTIONS, RUN_OPTIONS
from fitgpt.web.page_files import STATIC, catalogues

CATALOGUES = catalogues()
ABOUT = {"language", "direction"}
# Keys that the scripts make from a name: t(`option.${name}`).
NAMED = {
    "option": {*RUN_OPTIONS, *QUESTIONS, "max_iters", "preset"}, "phase": set(PHASES), "goal": set(GOALS),
    "part": {*OWNERS, "others", "outside", "unallocated"}, "kind": {"lossy", "batch", "other"},
    "verdict": {"fits", "tight", "does_not_fit", "problem", "none"}, "gpus": {"fits", "tight", "does_not_fit"},
    "paste.read": {"config", "command"}, "group": {"amd", "workstation", "data_centre"},
    "tile": {"steps", "loss", "speed", "time_left", "reserved", "headroom", "device"},
}


def used_keys() -> set[str]:
    scripts = "".join(path.read_text(encoding="utf-8") for path in STATIC.glob("*.js"))
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    found = {*re.findall(r'data-t(?:-label)?="([^"]+)"', page)}
    for call in re.findall(r"\bt\(([^`]*?)[,)]", scripts):  # t("a") and t(condition ? "a" : "b")
        found |= {*re.findall(r'(?<![=!]= )"([a-z_.]+)"', call)}
    prefixes = {*re.findall(r"\bt\(`([a-z.]+)\.\$", scripts)}
    assert prefixes == set(NAMED)
    return found | {f"{prefix}.{name}" for prefix, names in NAMED.items() for name in names}


def test_english_has_every_key_that_is_used_and_no_other() -> None:
    assert used_keys() ^ (CATALOGUES["en"].keys() - ABOUT) == set()


@pytest.mark.parametrize("language", CATALOGUES)
def test_every_language_has_all_keys_with_the_same_placeholders(language: str) -> None:
    words, english = CATALOGUES[language], CATALOGUES["en"]
    assert words.keys() == english.keys()
    assert words["direction"] in ("ltr", "rtl")
    for key, text in english.items():
        assert sorted(re.findall(r"{\w+}", words[key])) == sorted(re.findall(r"{\w+}", text)), key
        assert words[key].strip(), key
