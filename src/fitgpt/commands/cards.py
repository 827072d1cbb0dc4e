"""`fitgpt cards`: the GPUs that can be planned for, with their figures and where each comes from."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..config.command_options import CardsOptions
from ..core.errors import UsageError
from ..core.units import MiB, show_bytes
from ..hardware import gpus
from ..show.plan_text import card_table
from ..show.terminal import columns

SCHEMA = 1


def cards(options: CardsOptions) -> int:
    try:
        found = gpus.search(options.filter) or [gpus.find(options.filter)]  # another spelling
    except UsageError as error:
        raise UsageError(error.what, error.fix.replace("--gpu", "fitgpt cards")) from None
    if options.json:
        print(json.dumps({"schema": SCHEMA, "cards": [asdict(card) for card in found]}, indent=1, ensure_ascii=False))
        return 0
    known = {True: "yes", False: "no", None: "?"}
    rows = [(card.name, f"{card.memory_gb} GB" if card.memory_gb else "shared",
             show_bytes(card.usable_mib * MiB) if card.usable_mib else "?", known[card.bf16],
             f"{card.tflops:g}" if card.tflops else "?", f"{card.usable_src or '–'}, {card.tflops_src or '–'}")
            for card in found]
    print(card_table(rows, columns()), end="")
    return 0
