"""Does what `fitgpt fit` accepts really train, and does what it rejects really fail? Models, batches and
budgets drawn at random.

    python bench/triples.py --draw bench/triples.json                       no GPU: draws them, and asks fit about each
    python bench/triples.py bench/triples.json --dataset data/stdlib-gpt2 -o bench/results/triples_h200.json

What is drawn is what is kept. An accepted one is run as a user would: `fitgpt fit … -o`, `fitgpt train --plan` with a
rehearsal, evaluations and checkpoints, and `fitgpt train --resume` in another process, all under the budget. Of a
rejected one, the plan that would need least runs under the same cap, in bench/record.py's phases: it must run out.
Nothing is timed, so they run side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from record import in_own_process  # noqa: E402

from fitgpt import __version__  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.files import write_over  # noqa: E402
from fitgpt.core.units import GiB, MiB  # noqa: E402
from fitgpt.hardware.gpus import find  # noqa: E402
from fitgpt.planning.budget import on_card  # noqa: E402
from fitgpt.planning.fit import with_margin  # noqa: E402
from fitgpt.planning.fit_goals import find_fastest  # noqa: E402
from fitgpt.planning.fit_search import FitTarget, parse_allow  # noqa: E402

SEED, ACCEPTED, REFUSED = 20261115, 60, 20
SHORT = ["--max_iters=4", "--eval_interval=4", "--eval_iters=2", "--log_interval=1"]
MORE = ["--resume", "--max_iters=6", "--rehearse=False"]
LARGEST = 500e6  # parameters: larger ones are bench/capped.py's; their checkpoints would fill a disk
MOST_TOKENS = 80_000  # in a step
HOST = 64 * GiB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("triples", nargs="?", default="")
    parser.add_argument("--draw", default="")
    parser.add_argument("--dataset", default="data/stdlib-gpt2")
    parser.add_argument("--at_once", type=int, default=10)
    parser.add_argument("--first", type=int, default=ACCEPTED + REFUSED, help="only this many of them")
    parser.add_argument("--folders", default="", help="where runs are kept for a while, in turn: some, by commas")
    parser.add_argument("-o", "--out", default="")
    options = parser.parse_args()
    if options.draw:
        Path(options.draw).write_text(json.dumps({"seed": SEED, "triples": draw()}, indent=1) + "\n", encoding="utf-8")
        return 0
    triples = json.loads(Path(options.triples).read_text(encoding="utf-8"))["triples"][:options.first]
    folders, writing = itertools.cycle(options.folders.split(",")), threading.Lock()
    started, rows = time.time(), dict[str, dict[str, Any]]()

    def go(triple: dict[str, Any]) -> None:
        """Written after each, so that what is there counts if time runs out."""
        row = accepted(triple, options.dataset, next(folders)) if triple["accepted"] else refused(triple)
        with writing:
            rows[triple["name"]] = row
            if options.out:
                write(Path(options.out), [rows[each["name"]] for each in triples if each["name"] in rows])

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(go, triples))
    passed = sum(row["passed"] for row in rows.values())
    print(f"{passed} of {len(rows)} as forecast, in {time.time() - started:.0f} s")
    for row in rows.values():
        if not row["passed"]:
            print(row["name"], json.dumps(row)[:1500])
    return 0 if passed == len(triples) else 1


# ---- what is run


def draw() -> list[dict[str, Any]]:
    rng, triples = random.Random(SEED), list[dict[str, Any]]()
    while len(triples) < ACCEPTED + REFUSED:
        triple = asked_of_fit(one(rng, large=len(triples) >= ACCEPTED))
        if triple["accepted"] == (len(triples) < ACCEPTED):
            triples.append({"name": f"{'accepted' if triple['accepted'] else 'refused'} {len(triples):02}", **triple})
    return triples


def one(rng: random.Random, *, large: bool) -> tuple[dict[str, Any], int, str]:
    """A model that is worth its budget: from 4 to 90 bytes per parameter; or, for runs to be rejected, from 2 to 8.
    What does not train in a few seconds is drawn again."""
    while True:
        heads, head = rng.choice([4, 6, 8, 9, 12, 16, 20]), rng.choice([48, 64, 64, 64, 80, 128])
        settings = {"n_layer": rng.choice([4, 6, 8, 10, 12, 16, 18, 24, 36]), "n_head": heads, "n_embd": heads * head,
                 "block_size": rng.choice([256, 512, 1024, 1024, 2048]), "dtype": rng.choice(["bfloat16", "float16"]),
                 "batch_size": rng.choice([1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64]),
                 "gradient_accumulation_steps": rng.choice([1, 2, 4, 5, 8]),
                 "bias": rng.random() < 0.25, "dropout": rng.choice([0.0, 0.0, 0.0, 0.1])}
        budget, allow = rng.randrange(3 * 1024, 12 * 1024) * MiB, rng.choice(["", "", "lossy"])
        config = RunConfig(**settings, vocab_size=50304)
        params = config.gpt_config().count_params()
        if config.tokens_per_step > MOST_TOKENS:
            continue
        if large and 2 < budget / params < 8:
            return settings, budget, "lossy"
        if not large and params <= LARGEST and 4 < budget / params < 90:
            return settings, budget, allow


def asked_of_fit(drawn: tuple[dict[str, Any], int, str]) -> dict[str, Any]:
    settings, budget, allow = drawn
    place = on_card(find("H200"), budget=budget, torch="2.11")
    target = FitTarget(place.platform, with_margin(place), place.card, host_bytes=HOST)
    found = find_fastest(RunConfig(**settings, vocab_size=50304), target, parse_allow(allow))
    triple = {"accepted": found.chosen is not None, "config": settings, "budget": budget, "allow": allow}
    if found.chosen is None:
        assert found.least is not None
        triple |= {"least": found.least.config.to_dict(), "needs": found.least.needs,
                   "cap": found.budget.reserve_limit}
    return triple


# ---- running


def accepted(triple: dict[str, Any], dataset: str, where_to: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=where_to or None) as folder:
        written, out = Path(folder) / "fitted.py", Path(folder) / "out"
        settings = [f"--{key}={value}" for key, value in triple["config"].items()]
        where = [f"--dataset={dataset}", f"--budget={triple['budget'] // MiB}MiB"]
        plan = f"--plan={written.with_suffix('.plan.json')}"
        train = ["train", plan, *where, f"--out_dir={out}", *SHORT]
        codes, words = list[int](), ""
        for command in (["fit", *settings, *where, *([f"--allow={triple['allow']}"] if triple["allow"] else []),
                         f"-o={written}"], train, [*train, *MORE]):
            done = subprocess.run([sys.executable, "-m", "fitgpt", *command], capture_output=True, text=True, env={
                **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
                "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "4"}, check=False)
            codes.append(done.returncode)
            if done.returncode:
                words = (done.stdout[-600:] + done.stderr[-600:]).strip()
                break
        metrics = out / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        shutil.rmtree(out, ignore_errors=True)
    return {**triple, **story(rows), "exit_codes": codes, **({"words": words} if words else {}),
            "passed": is_whole(codes, rows)}


def is_whole(codes: list[int], rows: list[dict[str, Any]]) -> bool:
    """Every step once, evaluated at the start and at both ends, saved at both, and nothing ran out."""
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    evaluated = {row["step"] for row in rows if row["kind"] == "eval"}
    saved = {row["step"] for row in rows if row["kind"] == "save"}
    trouble = [row for row in rows if row["kind"] in ("oom", "step_down", "went_back")]
    return codes == [0, 0, 0] and steps == list(range(6)) and evaluated >= {0, 4, 6} and {4, 6} <= saved \
        and not trouble


def story(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What fit chose, what was forecast and what was measured."""
    first = {kind: next((row for row in rows if row["kind"] == kind), {}) for kind in ("run", "plan", "plan_measured")}
    asked = first["run"].get("config", {})
    settings = ("batch_size", "gradient_accumulation_steps", "saved_activations", "loss_chunk", "eval_batch_size",
                "optimizer", "weights", "residual", "offload", "step_in_backward", "compile", "cuda_graphs")
    return {"chosen": {key: asked[key] for key in settings if key in asked}, "params": first["run"].get("params"),
            "device_name": first["run"].get("device_name"), "torch": first["run"].get("versions", {}).get("torch"),
            "needs": first["plan"].get("needs_bytes"), "cap": first["plan"].get("reserve_limit_bytes"),
            "foreseen": first["plan"].get("phases"), "measured": first["plan_measured"].get("phases"),
            "ran_out": [row.get("text") for row in rows if row["kind"] == "oom"],
            "losses": [row["loss"] for row in rows if row["kind"] == "step"]}


def refused(triple: dict[str, Any]) -> dict[str, Any]:
    found = in_own_process({"name": triple["name"], "config": triple["least"], "cap": triple["cap"]}, "", 200)
    return {**triple, **{key: found[key] for key in ("out_of_memory", "phases", "error") if key in found},
            "passed": "out_of_memory" in found}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    one_of = next((row for row in rows if row.get("device_name")), {})
    write_over(path, json.dumps(
        {"what": "random runs that fit accepts, trained, evaluated, saved and resumed under their budgets; and the "
         "smallest plans of runs that it refuses, under the same caps", "date": time.strftime("%Y-%m-%d"),
         "card": one_of.get("device_name"), "torch": one_of.get("torch"), "fitgpt": __version__,
         "command": "python bench/triples.py bench/triples.json --dataset data/stdlib-gpt2", "rows": rows},
        indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
