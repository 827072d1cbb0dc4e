"""The generated parts of docs/memory.md, accuracy.md and benchmarks.md: recorded runs, forecasts, rules of thumb."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from accuracy import NANOGPT_RECORDS, RECORDED, Figure, by_run, is_odd, of_file, table
from fitgpt.config.architectures import GPTConfig
from fitgpt.config.argv import walk
from fitgpt.config.memory_savers import loss_chunk_tokens
from fitgpt.config.run_config import RunConfig, config_from, resolve_run
from fitgpt.core.units import GiB, MiB, show_bytes
from fitgpt.hardware.gpus import find
from fitgpt.memory.platform import Platform
from fitgpt.memory.timeline import replay
from fitgpt.planning.budget import budget_for, platform_for
from fitgpt.planning.forecast import Forecast, forecast, write_tape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
CARD = find("4070")
SETTING = platform_for(CARD, torch="2.11")
OUTSIDE = budget_for(CARD).outside
H200 = Platform((9, 0), "2.11")


def read_rows(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
    return rows


def recorded_rows(name: str) -> list[dict[str, Any]]:
    """Runs of tests/recorded, by the name of the file."""
    rows: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]) + "\n"


# ---- from recorded runs

def memory_part() -> str:
    """nanoGPT's runs and ours of the same shapes, under the cap of a 12 GB GPU."""
    theirs = {row["name"]: row for row in recorded_rows("nanogpt/models_30m_to_124m")}
    cap = json.loads((RESULTS / "capped_4070_on_h200.json").read_text(encoding="utf-8"))["cap_bytes"]
    rows = []
    for size, shape in (("77m", "77M, batch 16 × 1024"), ("30m", "30M, batch 16 × 512")):
        for compiled in (False, True):
            how = "compiled" if compiled else "eager"
            row = theirs[f"{size.upper()} {how}"]
            rows.append(_memory_line(f"{shape}, {how}", "nanoGPT", row["train_peak"], row["train_reserved"],
                                     row["eval_peak"], cap))
            for ours in read_rows("capped_4070_on_h200.json"):
                if (ours["config"], ours["dtype"], ours["compile"]) == (f"config/notes_{size}.py", "float16", compiled):
                    rows.append(_memory_line("", "**fitgpt**", ours["train_allocated"], ours["train_reserved"],
                                             ours["eval_allocated"], cap))
    return markdown(["run", "trainer", "training, allocated", "training, reserved", "evaluation, allocated",
                     f"within {show_bytes(cap)}"], rows)


def _memory_line(run: str, trainer: str, allocated: int, reserved: int, evaluation: int, cap: int) -> list[str]:
    """Reserved under the cap: it fits. Allocated above it: it cannot. Between the two the allocator may yet manage."""
    fits = "yes" if reserved <= cap else "no" if allocated > cap else "perhaps"
    return [run, trainer, *(show_bytes(nbytes) for nbytes in (allocated, reserved, evaluation)), fits]


def nanogpt_part() -> str:
    return markdown(
        ["run", "batch × block", "dtype", "training, allocated", "training, reserved", "evaluation, allocated"],
        [[row["name"], f"{row['config']['batch_size']} × {row['config']['block_size']}", row["config"]["dtype"],
          *(show_bytes(row[key]) for key in ("train_peak", "train_reserved", "eval_peak"))]
         for row in recorded_rows("nanogpt/models_30m_to_124m")])


def owners_part(*name: str) -> str:
    """Whose bytes an eager run of nanoGPT holds at its peak: the formula, and the recorded peak under it."""
    row = next(row for row in recorded_rows("nanogpt/models_30m_to_124m") if row["name"] == " ".join(name))
    owners = nanogpt_owners(row["config"])
    total, peak = sum(nbytes for _, _, nbytes in owners), row["train_peak"]
    rows = [[owner, formula, f"{nbytes / MiB:,.0f}", f"{nbytes / total:.1%}"]
            for owner, formula, nbytes in sorted(owners, key=lambda each: -each[2])]
    rows.append(["**sum**", "", f"**{total / MiB:,.0f}**", ""])
    rows.append(["recorded peak", "", f"{peak / MiB:,.0f}", f"the sum is {total / peak - 1:+.2%} off"])
    return markdown(["owner", "formula", "MiB", "share"], rows)


def nanogpt_owners(config: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(owner, formula, bytes) of nanoGPT's eager training peak, inside the backward pass of the loss."""
    B, T, C, H, L, V = (config[key] for key in ("batch_size", "block_size", "n_embd", "n_head", "n_layer",
                                                "vocab_size"))
    P = parameters(config)
    N = B * T
    return [
        ("logits, and their copies in the loss", "12·N·V", 12 * N * V),
        ("activations saved by the blocks", "L·(36·N·C + 16·N + 4·N·H)", L * (36 * N * C + 16 * N + 4 * N * H)),
        ("AdamW's two moments", "8·P", 8 * P),
        ("weights", "4·P", 4 * P),
        ("gradients, while accumulating", "4·P", 4 * P),
        ("half-precision copies of the weights", "2·(12·L·C² + V·C)", 2 * (12 * L * C * C + V * C)),
        ("cuBLAS workspaces", "2 × 32 MiB", 2 * 32 * MiB),
        ("embeddings, last norm, the batch", "6·N·C + 40·N", 6 * N * C + 40 * N),
    ]


def parameters(config: dict[str, Any]) -> int:
    return GPTConfig(block_size=config["block_size"], vocab_size=config["vocab_size"], n_layer=config["n_layer"],
                     n_head=config["n_head"], n_embd=config["n_embd"], bias=config["bias"]).count_params()


def chunk_part() -> str:
    """The logits of one chunk of the loss, and all logits, for the 77M run."""
    tokens, vocab = 16 * 1024, 50304
    chunk = loss_chunk_tokens(tokens, vocab)
    return (f"For the 77M run a chunk is {chunk:,} tokens: {show_bytes(2 * chunk * vocab)} of half-precision logits at "
            f"a time. All {tokens:,} tokens would take {show_bytes(2 * tokens * vocab)} in half precision, and "
            f"{show_bytes(12 * tokens * vocab)} in nanoGPT's loss.\n")


# ---- from the planner, for a 4070

BLOCK_TENSORS = {  # tensors of a block under their names on the tape
    "x": "input of the block, the residual stream in float32", "h1": "output of the first LayerNorm",
    "qkv": "queries, keys and values", "att": "output of attention",
    "lse": "log-sum-exp of attention, one float32 per token and head", "proj": "attention's output projection",
    "h2": "output of the second LayerNorm", "fc": "output of the MLP's first matmul", "g": "output of GELU",
    "linear": "output of the MLP's second matmul",
}


def tensors_part(name: str) -> str:
    """Every tensor of a training run of at least a byte per token, in the order in which the tape allocates them."""
    config = resolve_run(replace(run_of(name), compile=True, cuda_graphs=False), SETTING)
    tape = write_tape(config, SETTING, "fitgpt")
    params, tokens = config.gpt_config().count_params(), config.batch_size * config.block_size
    start = next(phase.start for phase in tape.phases if phase.name == "first_train")
    rows = [[what, where, lives, f"{total / MiB:,.0f}"] for what, where, lives, total in (
        ("weights, float32", "4 × P", "the whole run", 4 * params),
        ("AdamW's first moment `exp_avg`, float32", "4 × P", "the whole run", 4 * params),
        ("AdamW's second moment `exp_avg_sq`, float32", "4 × P", "the whole run", 4 * params))]
    at = {event.name: number for number, event in reversed(list(enumerate(tape.events))) if event.alloc
          and number >= start}  # the first allocation of each name
    freed_before_loss = {event.name for event in tape.events[start:at["logits"]] if not event.alloc}
    for event in tape.events[at["0.x"]:at["1.x"]]:  # the first layer
        if event.alloc and event.owner == "activations" and event.nbytes >= tokens:
            kept, tensor = event.name not in freed_before_loss, event.name.removeprefix("0.")
            rows.append([f"each layer: {BLOCK_TENSORS.get(tensor, tensor)} `{tensor}`",
                         _per_token(event.nbytes, tokens, config),
                         "until the layer's backward pass" if kept else "in the layer's forward pass",
                         f"{event.nbytes * (config.n_layer if kept else 1) / MiB:,.0f}"])
    logits = tape.events[at["logits"]].nbytes
    chunk = logits // (2 * config.vocab_size)
    rows.append(["logits of one chunk of the loss, overwritten by their gradient", f"2 × V × {chunk:,} tokens",
                 "one chunk", f"{logits / MiB:,.0f}"])
    rows.append(["half-precision copy of each weight matrix; the largest is the output head's", "2 per element",
                 "one matmul", f"{2 * config.vocab_size * config.n_embd / MiB:,.0f}"])
    rows.append(["gradients, float32", "4 × P", "from the backward pass to the optimizer step",
                 f"{4 * params / MiB:,.0f}"])
    return markdown(["tensor", "bytes", "lives", "MiB in all"], rows)


def _per_token(nbytes: int, tokens: int, config: RunConfig) -> str:
    for letter, size in (("C", config.n_embd), ("H", config.n_head)):
        if nbytes % (tokens * size) == 0:
            return f"{nbytes // (tokens * size)} × {letter} per token"
    return f"{nbytes / tokens:g} per token"


def run_of(name: str, *flags: str) -> RunConfig:
    """The notes' run with some changes; its vocabulary is GPT-2's, whatever data lies around."""
    return config_from(walk([str(ROOT / "config" / f"{name}.py"), "--vocab_size=50304", *flags], RunConfig))[0]


def process_part(name: str, trainer: str) -> str:
    """The process as nvidia-smi shows it while it trains, owner by owner."""
    found = forecast(replace(run_of(name), compile=True), SETTING, trainer)
    rows = [[each.owner, each.formula, f"{each.nbytes / MiB:,.0f}"] for each in found.owners_at_peak
            if each.nbytes >= MiB]
    rest = sum(each.nbytes for each in found.owners_at_peak if each.nbytes < MiB)
    rows.append(["reserved but not allocated at the peak", "fragmentation and rounding",
                 f"{(found.reserved - found.allocated + rest) / MiB:,.0f}"])
    rows.append(["outside the allocator", f"context and kernels on a 4070 ({CARD.outside_src})",
                 f"{OUTSIDE / MiB:,.0f}"])
    rows.append(["**the process**", "", f"**{(found.reserved + OUTSIDE) / MiB:,.0f}**"])
    return markdown(["owner", "formula", "MiB"], rows)


EVALUATES, BELOW = "evaluation no longer out of memory", "below 4 GB"
UNCHANGED, IGNORED, DEFAULT = "unchanged", "ignored: unchanged", "is the default"
WAYS = {  # what the notes propose for each run: text, claim, flags, each trainer's recorded run
    "notes_77m": (
        (UNCHANGED, "", (), "77M compiled", "77M"),
        ("`eval_batch_size = 4`", EVALUATES, ("--eval_batch_size=4",), IGNORED, "77M, eval_batch_size 4"),
        ("`eval_block_size = 512`", EVALUATES, ("--eval_block_size=512",), IGNORED, "77M, eval_block_size 512"),
        ("`eval_iters = 100` instead of 200", EVALUATES, ("--eval_iters=100",), "77M compiled", "77M"),
        ("narrower: `n_embd = 512`, with 8 heads", EVALUATES, ("--n_embd=512", "--n_head=8"), "77M, width 512",
         "77M, width 512"),
        ("`grad_checkpoint = True`", EVALUATES, ("--grad_checkpoint=True",), IGNORED, "77M, grad_checkpoint"),
        ("expandable segments", EVALUATES, (), "77M, expandable segments", DEFAULT)),
    "notes_30m": (
        (UNCHANGED, "", (), "30M compiled", "30M"),
        ("batch 8, accumulation 8", BELOW, ("--batch_size=8", "--gradient_accumulation_steps=8"), "30M, batch 8",
         "30M, batch 8"),
        ("block 256", BELOW, ("--block_size=256",), "30M, block 256", "30M, block 256"),
        ("`grad_checkpoint = True`", BELOW, ("--grad_checkpoint=True",), IGNORED, "30M, grad_checkpoint")),
}


def ways_part(name: str) -> str:
    """Each of the notes' proposals for one of its runs: the claim, the forecast of the process on a 4070, and what was
    reserved when it was measured on an H200."""
    nanogpt = {row["name"]: row["train_reserved"]
               for name in ("nanogpt/models_30m_to_124m", "nanogpt/remedies_and_random") for row in recorded_rows(name)}
    ours = {row["name"]: max(each["reserved"] for each in row["phases"].values())
            for row in recorded_rows("engine/memory_page")}

    def reserved(trainer: str, platform: Platform, flags: tuple[str, ...], recorded: str) -> int:
        config = resolve_run(replace(run_of(name, *flags), compile=True), platform)
        expandable = platform.uses_expandable_segments(trainer) or recorded.endswith("expandable segments")
        return replay(write_tape(config, platform, trainer), expandable=expandable).reserved

    def row(trainer: str, flags: tuple[str, ...], recorded: str, measured: dict[str, int]) -> list[str]:
        if recorded in (IGNORED, DEFAULT):
            return [recorded, ""]
        process, before = (reserved(trainer, SETTING, *each) + OUTSIDE for each in ((flags, recorded), ((), "")))
        share = f" ({process / before - 1:+.0%})".replace("-", "−").replace("+0", "±0")
        changed = share if flags or process != before else ""
        there = reserved(trainer, H200, flags, recorded)
        return [f"{process / MiB:,.0f} MiB{changed}", f"{there / MiB:,.0f} / {measured[recorded] / MiB:,.0f}"]

    rows = [[words, claimed, *row("nanogpt", flags, theirs, nanogpt), *row("fitgpt", flags, own, ours)]
            for words, claimed, flags, theirs, own in WAYS[name]]
    both = "on an H200, MiB reserved: forecast / measured"
    return markdown(["proposal", "claimed", "nanoGPT's process, 4070", both, "fitgpt's process, 4070", both], rows)


def needs_part(name: str) -> str:
    """The least each trainer needs of the allocator, and what the GPU leaves it."""
    def row(trainer: str, found: Forecast) -> list[str]:
        limit = budget_for(CARD).reserve_limit
        beside = budget_for(CARD, others=2118 * MiB).reserve_limit
        return [trainer, show_bytes(found.needs), "yes" if found.needs <= limit else "no",
                "yes" if found.needs <= beside else "no"]

    config = run_of(name)
    rows = [row(f"{trainer}, {'compiled' if compiled else 'eager'}",
                 forecast(replace(config, compile=compiled), SETTING, trainer))
            for trainer in ("nanogpt", "fitgpt") for compiled in (False, True)]
    expandable = forecast(replace(config, compile=True), replace(SETTING, expandable_requested=True), "nanogpt")
    rows.insert(2, row("nanogpt, compiled, expandable segments", expandable))
    return markdown(["trainer", "needs", "fits a 4070", "fits beside 2118 MiB of other programs"], rows)


# ---- the formulas people use

def calculators_part() -> str:
    """Published rules of thumb for the 77M run, beside what was measured."""
    measured = {row["name"]: row for row in recorded_rows("nanogpt/models_30m_to_124m")}
    config = measured["77M eager"]["config"]
    B, T, C, H, L = (config[key] for key in ("batch_size", "block_size", "n_embd", "n_head", "n_layer"))
    P, wide = parameters(config), B * T * C * L
    said = [
        ("Hugging Face's calculator (`accelerate estimate-memory`) in its row for float16, with Adam: 8·P", 8 * P),
        ("the same calculator in its row for float32, four times the weights: 16·P", 16 * P),
        ("40 bytes per parameter, for Adam and mixed precision (the NAIRR Pilot's guide)", 40 * P),
        ("16·P, and activations of 34·B·T·C·L (Korthikanti and others, 2022, attention recomputed)",
         16 * P + 34 * wide),
        ("the same, with attention scores kept: B·T·C·L·(34 + 5·H·T/C)", 16 * P + 34 * wide + 5 * B * T * T * H * L),
        ("the notes' own: 160·B·T·C·L × 2 bytes", 320 * wide),
    ]
    tape = {how: replay(write_tape(RunConfig(**{**config, "compile": how == "compiled"}),
                                replace(SETTING, capability=(9, 0)), "nanogpt")).reserved
            for how in ("eager", "compiled")}
    rows = [[words, f"{nbytes / GiB:.2f} GiB", *(f"{nbytes / measured[f'77M {how}']['train_reserved'] - 1:+.0%}"
                                                 for how in ("eager", "compiled"))] for words, nbytes in said]
    rows.append(["`fitgpt plan --trainer nanogpt`", " / ".join(f"{each / GiB:.2f}" for each in tape.values()) + " GiB",
                 *(f"{tape[how] / measured[f'77M {how}']['train_reserved'] - 1:+.1%}" for how in tape)])
    rows.append(["**measured: reserved**", " / ".join(
        f"{measured[f'77M {how}']['train_reserved'] / GiB:.2f}" for how in tape) + " GiB", "", ""])
    return markdown(["rule", "says", "against 77M eager", "against 77M compiled"], rows)


def accuracy_part() -> str:
    """How far forecasts are from recorded runs: one line for each kind of run."""
    found: list[tuple[str, int, list[Figure]]] = []
    recorded = [of_file(path) for path in NANOGPT_RECORDS]
    for how, compiled, odd in (("eager", False, False), ("compiled", True, False),
                               ("compiled, a vocabulary or batch that is no multiple of 8", True, True)):
        runs = [{name for name, config in configs.items() if config["compile"] == compiled and is_odd(config) == odd}
                for _, _, configs in recorded]
        figures = [figure for those, (_, there, _) in zip(runs, recorded, strict=True) for figure in there
                   if figure.run in those]
        found.append((f"nanoGPT's `train.py`, {how}", sum(map(len, runs)), figures))
    engine = RECORDED / "engine"
    for path, label in ((engine / "random.json", "fitgpt, drawn at random, eager and compiled"),
                        (engine / "held_out.json", "fitgpt, drawn wider, after all corrections"),
                        (engine / "attention_kernels.json", "fitgpt with each attention kernel"),
                        (RESULTS / "triples_h200.json", "`fitgpt train` of what `fit` chose, by what it said before")):
        _, figures, configs = of_file(path)
        found.append((label, len(configs), figures))
    rows = []
    for words, how_many, figures in found:
        off = sorted(abs(figure.percent) for figure in figures)
        rows.append([words, str(how_many), str(len(figures)),
                     str(sum(not figure.off for figure in figures)), str(sum(each <= 1 for each in off)),
                     f"{off[len(off) // 2]:.3f} %", f"{off[-1]:.3f} %",
                     f"{min(figure.percent for figure in figures):+.3f} %"])
    return markdown(["recorded on an H200", "runs", "figures", "to the byte", "within 1 %", "median off",
                     "farthest off", "farthest below"], rows)


def figures_part(record: str) -> str:
    """nanoGPT's runs of one record, a line for each figure."""
    return table(of_file(RECORDED / "nanogpt" / f"{record}.json")[1]) + "\n"


def by_run_part(record: str) -> str:
    """nanoGPT's runs of one record, a line each."""
    _, figures, configs = of_file(RECORDED / "nanogpt" / f"{record}.json")
    return by_run(figures, configs) + "\n"


PARTS = {"accuracy": accuracy_part, "by_run": by_run_part, "calculators": calculators_part, "chunk": chunk_part,
         "figures": figures_part, "memory": memory_part, "nanogpt": nanogpt_part, "needs": needs_part,
         "owners": owners_part, "process": process_part, "tensors": tensors_part, "ways": ways_part}
