"""How fast and how small is the engine, beside a plain one? On one GPU, in one run, each contender in a process
of its own with an empty compile cache of its own; all are started once, then take turns, round after round:

    python bench/engine.py --case 124m -o bench/results/engine_124m_h200.json

`plain` is a baseline of ours that does what nanoGPT does (bench/plain.py); `transformers` runs where it is installed.
A contender's settings are options of `fitgpt train`, so what is measured here can be run there. With `--cap 11.3GiB`
every process can reserve that much; `fitted` is then what `fitgpt fit` chooses for it, and `plain@13` plain
with another batch:

    python bench/engine.py --case 124m --cap 11.3GiB --contenders plain@14,plain@13,plain,fitted
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

from fitgpt import __version__  # noqa: E402
from fitgpt.config.run_config import RunConfig  # noqa: E402
from fitgpt.core.units import GiB, parse_bytes  # noqa: E402
from fitgpt.hardware.allocator_env import child_environment  # noqa: E402
from fitgpt.hardware.gpus import find  # noqa: E402
from fitgpt.planning.budget import on_card  # noqa: E402
from fitgpt.planning.fit_goals import find_fastest  # noqa: E402
from fitgpt.planning.fit_search import FitTarget  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=12, accumulation=4, dtype="bfloat16"),
    "77m": dict(n_layer=12, n_head=12, n_embd=576, block_size=1024, batch_size=16, accumulation=4, dtype="float16"),
    "30m": dict(n_layer=6, n_head=6, n_embd=384, block_size=512, batch_size=16, accumulation=4, dtype="float16"),
}
BEGUN = time.perf_counter()
PEAK_FLOPS = 989e12  # H200's dense bfloat16 rate, its vendor's
LOSSY = dict(weights="bfloat16", residual="bfloat16", optimizer="adam8bit")
OURS: dict[str, dict[str, Any]] = {
    "exact": dict(),
    "exact kept": dict(casts="kept"),
    "exact small": dict(saved_activations="no_mlp_up"),
    "exact smallest": dict(saved_activations="input"),
    "exact eager": dict(compile=False),
    "exact unrecorded": dict(cuda_graphs=False),
    "exact all": dict(saved_activations="all"),
    "8-bit": dict(optimizer="adam8bit"),
    "8-bit bitsandbytes": dict(optimizer="adam8bit", adam8bit="bitsandbytes"),
    "bfloat16 weights": dict(weights="bfloat16"),
    "bfloat16 residual": dict(residual="bfloat16"),
    "lossy": LOSSY,
    "lossy all": {**LOSSY, "saved_activations": "all"},
    "lossy small": {**LOSSY, "saved_activations": "no_mlp_up"},
    "lossy smallest": {**LOSSY, "saved_activations": "input"},
}
CONTENDERS: dict[str, dict[str, Any]] = {
    "plain": dict(kind="plain", compiled=True),
    "plain eager": dict(kind="plain", compiled=False),
    "transformers": dict(kind="transformers", compiled=True),
    **{name: dict(kind="ours", knobs=settings) for name, settings in OURS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="124m")
    parser.add_argument("--contenders", default="plain,exact,exact small,lossy,lossy small")
    parser.add_argument("--repeats", type=int, default=5, help="rounds in which every contender has its turn")
    parser.add_argument("--steps", type=int, default=15, help="of a turn, each timed; its median counts")
    parser.add_argument("--cap", default="", help="of each process's allocator")
    parser.add_argument("--together", action="store_true", help="start all at once: first steps then say nothing")
    parser.add_argument("--profile", default="", help="a folder for what each contender's kernels took")
    parser.add_argument("-o", "--out", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(json.loads(options.child))
        return
    with tempfile.TemporaryDirectory() as caches:
        names = options.contenders.split(",")
        cap = parse_bytes(options.cap) if options.cap else None
        started = dict[str, Contender]()
        for name in names:
            case = {**case_of(options.case, name, cap), "steps": options.steps, "cap": cap}
            started[name] = Contender(case, Path(caches) / name.replace(" ", "_"))
            if not options.together:
                started[name].wait()
                progress(f"{name} has made its first step")
        for each in started.values():
            each.wait()
        turns = []
        for number in range(options.repeats):
            turns.append({name: each.ask("train") for name, each in started.items()})
            progress(f"round {number + 1} of {options.repeats}")
        summaries = [summary(name, each, [turn[name] for turn in turns]) for name, each in started.items()]
        for row in summaries if "exact" in names else []:
            if row["contender"] == "exact":
                alone = Contender({**case_of(options.case, "exact", cap), "cap": cap, "alone": True},
                                  Path(caches) / "exact")
                row["evaluation_alone"] = alone.wait()
                alone.close()
        for name in names if options.profile else []:
            (Path(options.profile) / f"{options.case}_{name.replace(' ', '_')}.json").write_text(
                json.dumps(started[name].ask("profile"), indent=1))
        for each in started.values():
            each.close()
    compare(summaries)
    show(options.case, summaries)
    if options.out:
        Path(options.out).write_text(json.dumps(
            {"what": "training speed and memory: medians over rounds in which the contenders took turns; every "
             "process began with an empty compile cache", "case": CASES[options.case],
             "date": time.strftime("%Y-%m-%d"), "fitgpt": __version__, "repeats": options.repeats,
             "steps": options.steps, "cap_bytes": cap, "together": options.together,
             "command": " ".join(["python", "bench/engine.py", *map(_as_typed, sys.argv[1:])]), "rows": summaries},
            indent=1) + "\n")


def progress(words: str) -> None:
    print(f"{time.perf_counter() - BEGUN:6.1f} s  {words}", file=sys.stderr, flush=True)


def case_of(case: str, name: str, cap: int | None) -> dict[str, Any]:
    base = CASES[case]
    if name == "fitted":
        assert cap
        return fitted(base, cap)
    known, _, batch = name.partition("@")
    return {**base, **CONTENDERS[known], **({"batch_size": int(batch)} if batch else {})}


def fitted(base: dict[str, Any], cap: int) -> dict[str, Any]:
    """What `fit` makes of the case under an allocator's cap, on this GPU."""
    asked = RunConfig(**{key: value for key, value in base.items() if key != "accumulation"}, vocab_size=50304,
                      gradient_accumulation_steps=base["accumulation"])
    place = on_card(find("H200"), torch="2.11")
    budget = place.budget._replace(budget=cap + place.budget.outside)
    chosen = find_fastest(asked, FitTarget(place.platform, budget, place.card)).chosen
    assert chosen
    changed = {key: value for key, value in chosen.config.to_dict().items() if value != asked.to_dict()[key]}
    print("fitted:", changed, file=sys.stderr)
    batch, accumulation = changed.pop("batch_size", base["batch_size"]), changed.pop("gradient_accumulation_steps",
                                                                                    base["accumulation"])
    return {**base, "kind": "ours", "batch_size": batch, "accumulation": accumulation, "knobs": changed}


class Contender:
    """A process that has made its first step, and waits for its turns."""

    def __init__(self, case: dict[str, Any], cache: Path) -> None:
        environment = child_environment({
            **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'bench'}:{os.environ.get('PYTHONPATH', '')}",
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")})
        self.case = case
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen([sys.executable, __file__, "--child", json.dumps(case)], env=environment,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True)
        self.first: dict[str, Any] = {}

    def wait(self) -> dict[str, Any]:
        """For its first step."""
        self.first = self.first or self._answer()
        return self.first

    def ask(self, what: str) -> dict[str, Any]:
        if "error" in self.first:
            return self.first
        pipe = cast(TextIO, self._process.stdin)
        pipe.write(what + "\n")
        pipe.flush()
        return self._answer()

    def close(self) -> None:
        cast(TextIO, self._process.stdin).close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        for line in cast(TextIO, self._process.stdout):
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        self._words.seek(0)
        said = self._words.read().strip().splitlines()
        self.first = {"error": said[-1][:300] if said else "no words"}
        return self.first


def serve(case: dict[str, Any]) -> None:
    """In the child: a first step, then whatever is asked, one answer a line."""
    import torch
    from contenders import make_trainer

    from fitgpt.engine.oom import cap_memory
    from fitgpt.training.loop import flops_per_token

    if case.get("cap"):
        cap_memory("cuda:0", case["cap"])
    started = time.perf_counter()
    trainer, config = make_trainer(case)
    flops = flops_per_token(config, case["block_size"])
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (case["accumulation"], case["batch_size"], case["block_size"] + 1)).cuda()
    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    if case.get("alone"):
        resident = torch.cuda.memory_allocated()
        print(json.dumps({"resident": resident, **evaluate_turn(trainer, batches[0])}), flush=True)
        return
    trainer.step(batches)
    torch.cuda.synchronize()
    print(json.dumps({"first_step_s": time.perf_counter() - started, "device": torch.cuda.get_device_name(),
                      "torch": torch.__version__, "flops_a_token": flops}), flush=True)
    for _ in range(4):
        trainer.step(batches)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for line in sys.stdin:
        if line.strip() == "train":
            answer = train_turn(trainer, batches, case["steps"])
        elif line.strip() == "evaluate":
            answer = evaluate_turn(trainer, batches[0])
        else:
            from profiled import profile

            answer = profile(lambda: trainer.step(batches))
        print(json.dumps(answer), flush=True)


def train_turn(trainer: Any, batches: list[Any], steps: int) -> dict[str, Any]:
    import torch

    seconds = []
    trainer.step(batches)  # the GPU comes from another process
    for _ in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        trainer.step(batches)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return {"tokens_per_s": sum(idx.numel() for idx, _ in batches) / statistics.median(seconds),
            "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def evaluate_turn(trainer: Any, batch: tuple[Any, Any]) -> dict[str, Any]:
    import torch

    for _ in range(3):
        trainer.evaluate(*batch)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(10):
        trainer.evaluate(*batch)
    torch.cuda.synchronize()
    return {"eval_tokens_per_s": 10 * batch[0].numel() / (time.perf_counter() - begun),
            "reserved_with_eval": torch.cuda.max_memory_reserved()}


def summary(name: str, contender: Contender, turns: list[dict[str, Any]]) -> dict[str, Any]:
    evaluation = contender.ask("evaluate")
    shown = {key: contender.case[key] for key in ("batch_size", "accumulation", "knobs") if key in contender.case}
    failed = [each["error"] for each in (contender.first, *turns, evaluation) if "error" in each]
    if failed:
        return {"contender": name, **shown, "error": failed[0]}
    middle = {key: statistics.median(turn[key] for turn in turns) for key in ("tokens_per_s", "allocated", "reserved")}
    mfu = middle["tokens_per_s"] * contender.first["flops_a_token"] / PEAK_FLOPS
    return {"contender": name, **shown, **middle, "mfu": mfu, **contender.first, **evaluation,
            "turns": [turn["tokens_per_s"] for turn in turns]}


def compare(rows: list[dict[str, Any]]) -> None:
    """The ratio to plain is the median of the rounds' own ratios: what slows a whole round cancels. Of several plain
    ones the first that ran counts: under a cap, the largest batch."""
    plain = next((row for row in rows if row["contender"].split("@")[0] == "plain" and "turns" in row), None)
    for row in rows:
        if "turns" in row:
            row["ratio_to_plain"] = plain and statistics.median(
                ours / theirs for ours, theirs in zip(row["turns"], plain["turns"], strict=True))


def show(case: str, rows: list[dict[str, Any]]) -> None:
    print(f"{case}: {CASES[case]}")
    for row in rows:
        if "error" in row:
            print(f"{row['contender']:16} {row['error']}")
            continue
        ratio = f"{row['ratio_to_plain']:.3f}" if row["ratio_to_plain"] else "-"
        print(f"{row['contender']:16} {row['tokens_per_s']:>9,.0f} tok/s  × {ratio}  "
              f"reserved {row['reserved'] / GiB:.2f}, after evaluation {row['reserved_with_eval'] / GiB:.2f} GiB  "
              f"mfu {100 * row['mfu']:.1f} %  first step {row['first_step_s']:.1f} s  "
              f"eval {row['eval_tokens_per_s']:,.0f} tok/s")
        if alone := row.get("evaluation_alone"):
            print(f"{'':16} evaluation alone: {(alone['reserved_with_eval'] - alone['resident']) / GiB:.2f} GiB above "
                  "what is resident" if "resident" in alone else alone)


def _as_typed(word: str) -> str:
    if word.endswith(".json"):
        return f"bench/results/{Path(word).name}"
    return f"'{word}'" if " " in word else word


if __name__ == "__main__":
    main()
