"""The tables of measured speed in the docs: the engine and a plain baseline, what `fit` chose and what it did not,
nanoGPT and its estimate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from fitgpt.config.run_config import RunConfig
from fitgpt.core.units import GiB, show_bytes
from fitgpt.hardware.gpus import find
from fitgpt.planning import nanogpt_speed
from fitgpt.planning.budget import platform_for
from fitgpt.planning.measured_speeds import shipped
from fitgpt.planning.speed import likely_efficiency
from memory_page import RESULTS, markdown, read_rows

CASES = {"124m": "124M, 4 × 12 × 1024, bfloat16", "77m": "77M, 4 × 16 × 1024, float16",
         "30m": "30M, 4 × 16 × 512, float16"}


def engine_part() -> str:
    """Speed and memory beside the plain baseline, from bench/engine.py's results."""
    rows = [row for case in CASES for row in _contenders(case, f"engine_{case}_h200.json")]
    return markdown(["run", "trainer", "tokens/s", "× plain", "reserved in training", "with evaluation", "first step"],
                    rows)


def lossy_part() -> str:
    """The same of each lossy saver alone."""
    rows = [row[1:6] for row in _contenders("124m", "lossy_124m_h200.json")]
    return markdown(["trainer", "tokens/s", "× plain", "reserved in training", "with evaluation"], rows)


def _contenders(case: str, results: str) -> Iterator[list[str]]:
    for row in read_rows(results):
        name = row["contender"] if row["contender"] in ("plain", "transformers") else f"**{row['contender']}**"
        yield [CASES[case] if row["contender"] == "plain" else "", name, f"{row['tokens_per_s']:,.0f}",
               f"{row['ratio_to_plain']:.2f}", show_bytes(row["reserved"]), show_bytes(row["reserved_with_eval"]),
               f"{row['first_step_s']:.0f} s"]


def fitted_part() -> str:
    """Under the cap of a 12 GB GPU: plain at the largest batches that fit, and what `fit` makes of the same run."""
    rows = []
    for case in ("124m", "77m"):
        found = read_rows(f"fitted_{case}_h200.json")
        best = max(row["tokens_per_s"] for row in found if row["contender"] != "fitted")
        for at, row in enumerate(found):
            name = "**fitted**" if row["contender"] == "fitted" else "plain"
            rows.append([CASES[case].partition(",")[0] if not at else "", name,
                         f"{row['accumulation']} × {row['batch_size']}",
                         row.get("knobs", {}).get("saved_activations", ""),
                         f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / best:.2f}",
                         show_bytes(row["reserved_with_eval"])])
    return markdown(["run", "trainer", "micro-batches", "saved activations", "tokens/s", "× best plain",
                     "reserved"], rows)


def sweeps_part() -> str:
    """What `fit` chose beside the best of the others that fit, from bench/sweep.py's results."""
    rows = []
    for row in read_rows("sweeps_h200.json"):
        config = RunConfig(**row["config"], vocab_size=50304)
        others = [cell for cell in row["cells"][1:-1] if "tokens_per_s" in cell]
        best = max(others, key=lambda cell: cell["tokens_per_s"])
        rows.append([f"{config.gpt_config().count_params() / 1e6:.0f}M, {config.n_layer} × {config.n_embd}, "
                     f"block {config.block_size}", f"{row['budget'] / GiB:.1f} GiB", _cell(row["cells"][0]),
                     f"{row['chosen_tokens_per_s']:,.0f}", _cell(best), f"{best['tokens_per_s']:,.0f}",
                     f"{row['chosen_tokens_per_s'] / best['tokens_per_s']:.2f}"])
    return markdown(["model", "budget", "chosen", "tokens/s", f"best of {len(others)} others", "tokens/s", "ratio"],
                    rows)


def _cell(cell: dict[str, Any]) -> str:
    saved = cell["saved_activations"].replace(",", " ")
    return f"{cell['gradient_accumulation_steps']} × {cell['batch_size']}, {saved}"


def nanospeed_part() -> str:
    """nanoGPT's own train.py on an H200, from bench/nanospeed.py's results, beside the estimate."""
    rows = []
    for row in shipped("nanogpt"):
        card = find(row.card)
        expected = nanogpt_speed.modelled(row.config, card, platform_for(card), likely_efficiency(card))
        run = row.config
        rows.append([row.source.partition(", ")[2], f"{run.n_layer} × {run.n_embd}",
                     f"{run.gradient_accumulation_steps} × {run.batch_size} × {run.block_size}", run.dtype,
                     f"{row.tokens_per_s:,.0f}", f"{expected:,.0f}",
                     f"{100 * (expected / row.tokens_per_s - 1):+.1f} %"])
    return markdown(["run", "layers × width", "micro-batches", "dtype", "tokens/s", "estimated", "off by"], rows)


def recipe_part() -> str:
    """Time to equal loss with AdamW and with Muon, from bench/fineweb_recipe.py's results."""
    found = json.loads((RESULTS / "fineweb_recipe_h200.json").read_text(encoding="utf-8"))
    reached, rows = found["time_to_equal_loss"], []
    names = {"nanogpt adamw": "nanoGPT's train.py, AdamW", "fitgpt adamw": "fitgpt, AdamW",
             "fitgpt muon": "**fitgpt, Muon**", "fitgpt muon, half": "**fitgpt, Muon**, a schedule of half the length"}
    for name, title in names.items():
        row, equal = found["final"][name], reached["runs"][name]
        steps, loss = row["evals"][-1]
        rows.append([title, f"{row['case']['learning_rate']:g}", f"{steps}", f"{1000 * row['step_s']:.0f} ms",
                     f"{loss:.3f}", f"{equal['steps']:.0f}" if equal else "not reached",
                     f"{equal['seconds']:.0f} s" if equal else "not reached"])
    return markdown(["run", "learning rate", "steps", "per step", "validation loss",
                     f"steps to {reached['val_loss']:.3f}", "time to it"], rows)


def site_part() -> str:
    """Size and speed of the static site, from bench/site.py's results."""
    found = json.loads((RESULTS / "site.json").read_text(encoding="utf-8"))
    sent, seconds, slider = found["bytes"], found["seconds"], found["slider_ms"]
    head = (f"{found['date']}, Chromium {found['chromium'].partition('.')[0]}, {found['cores']} cores of an "
            f"{found['cpu']} with a load of {found['load']} per core, medians of {found['repeats']}:\n\n")
    return head + markdown(["", "first visit", "later visits"], [
        ["bytes sent by a host that compresses nothing", f"{sent['sent_on_first_visit'] / 1e6:.1f} MB", "0"],
        ["… by one that compresses text", f"{sent['compressed_by_host'] / 1e6:.1f} MB", "0"],
        ["precomputed verdict", f"{seconds['precomputed_verdict_cold']:.1f} s", ""],
        *([name, *(f"{seconds[visit][key]:.1f} s" for visit in ("cold", "warm"))] for name, key in (
            ("first verdict computed in the browser", "verdict"), ("CPU time until then", "verdict_cpu"),
            ("exact headroom", "exact"), ("all single changes", "fixes"))),
        ["bars after a move of a slider, median (95 %)", f"{slider['median']:.0f} ms ({slider['p95']} ms)", ""]])


PARTS: dict[str, Callable[..., str]] = {"engine": engine_part, "lossy": lossy_part, "fitted": fitted_part,
                                        "sweeps": sweeps_part, "nanospeed": nanospeed_part,
                                        "recipe": recipe_part, "site": site_part}
