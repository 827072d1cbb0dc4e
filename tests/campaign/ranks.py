"""SIGKILL of one of 2 or 3 gloo ranks at random moments, again and again, until the run gets to its end.

The moments and the options are seeded. Each rank is killed in turn. The other ranks must end by themselves, and the run
resumes from its last checkpoint.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.helpers import TINY, tiny_config
from tests.rank_processes import LOST, killed_at_random, logs, trained

from .drawn import drawn_settings
from .outcome import Campaign, Outcome, failed

REQUIRED = "200 kills, 0 lost, byte-identical"
RUNS, STEPS, MOST_KILLS = 20, 40, 14
SETTINGS = TINY | dict(gradient_accumulation_steps=6, n_embd=16, n_layer=1, batch_size=2, max_iters=STEPS,
                       lr_decay_iters=STEPS, eval_interval=11, save_interval=2, log_interval=5, dropout=0.1)


def campaign(folder: Path) -> Campaign:
    def weights(config_folder: Path) -> list[bytes]:
        return [path.read_bytes() for path in
                sorted((config_folder / "out" / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))]

    def run(case: str) -> Outcome:
        world, moments, kills = int(case.partition("-")[0]), random.Random(case), 0
        settings = drawn_settings(moments, **SETTINGS, gpus=f"{world}xcpu")
        for name in ("whole", "case"):
            shutil.rmtree(folder / name, ignore_errors=True)
        whole, config = (tiny_config(folder / name, **settings) for name in ("whole", "case"))
        assert trained(whole, world) == [0] * world, logs(whole)
        while True:
            victim = kills % world if kills < MOST_KILLS else None
            codes = killed_at_random(config, world, victim, moments.uniform(0, 0.1))
            if codes == [0] * world:
                break
            kills += 1
            if not set(codes) <= {-9, LOST, 0}:
                return failed("crashed", f"{codes} after {kills} kills\n{logs(config)}")._replace(count=kills)
        if weights(folder / "case") != weights(folder / "whole"):
            return failed("different", f"after {kills} kills of {settings}\n{logs(config)}")._replace(count=kills)
        return Outcome("byte-identical", count=kills)

    return Campaign([f"{world}-ranks-{number:03d}" for number in range(RUNS // 2) for world in (2, 3)], run)
