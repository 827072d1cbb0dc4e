"""What was pasted into the page, explained: an out-of-memory message, an nvidia-smi screen, a plan."""

from __future__ import annotations

from dataclasses import asdict
from io import BytesIO
from typing import Any

from ..commands.explain import WANTED, explain_text, skim
from ..config.command_options import ExplainQuestions
from ..sights import Diagnosis
from .settings import flags_in, read


def explain(text: str, query: str | None) -> dict[str, Any]:
    """`query`: the settings of the plan, if the run that ran out is the one planned there."""
    seen = skim(BytesIO(text.encode("utf-8", "replace")))
    asked = read(query) if query is not None else None
    questions = ExplainQuestions(trainer=asked.trainer if asked else "auto",
                                 others=asked.questions.others if asked else "")
    told = explain_text(seen, questions, asked.config if asked else None, "") if seen.text.strip() else None
    if told is None:
        nothing = "Nothing was pasted." if not text.strip() else ("This is no message about memory that fitgpt knows, "
                                                                  "and it does not guess.")
        told = Diagnosis("unknown", nothing, needed=WANTED[:2])
    document = asdict(told)
    for remedy in document["remedies"]:
        remedy["settings"] = flags_in(remedy["todo"]) or ({"trainer": "fitgpt"} if asked and asked.trainer == "nanogpt"
                                                          and remedy["todo"].startswith("fitgpt train") else {})
    return document
