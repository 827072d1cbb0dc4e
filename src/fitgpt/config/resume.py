"""What may change when a run is resumed: everything but the options declared with frozen_on_resume=True."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..core.errors import CheckpointError
from .fields import options_with, shown
from .run_config import AS_RECORDED, RunConfig, diff

FROZEN_ON_RESUME = frozenset(options_with(RunConfig, frozen_on_resume=True))
TOGETHER_ON_RESUME = ("batch_size", "gradient_accumulation_steps")  # may change if their product does not
# `dataset` may change its name or place: its fingerprint tells whether the data is the same.


def check_resume(recorded: Mapping[str, Any], wanted: Mapping[str, Any],
                 explicit_keys: Collection[str] | None = None) -> None:
    """CheckpointError if the wanted config would make the rest of the run another run.

    `explicit_keys`: compare only these options, by default all.
    """
    before = RunConfig.from_dict(recorded)
    changes = {key: (was, now) for key, was, now in diff(before, RunConfig.from_dict(wanted))
               if explicit_keys is None or key in explicit_keys}
    frozen = {key: change for key, change in changes.items()
              if key in FROZEN_ON_RESUME and change[1] != AS_RECORDED.get(key)}
    if frozen:
        differences = "; ".join(f"{key}={shown(now)} (it was {shown(was)})" for key, (was, now) in frozen.items())
        back = " ".join(f"--{key}={shown(was)}" for key, (was, _) in frozen.items())
        raise CheckpointError(f"The run in {before.out_dir} cannot be resumed with {differences}: it would be another "
                              "run.", f"{back} resumes it; another --out_dir without --resume starts a new run.")
    batch, steps = (changes[key][1] if key in changes else getattr(before, key) for key in TOGETHER_ON_RESUME)
    sequences = before.batch_size * before.gradient_accumulation_steps
    if batch * steps != sequences:
        works = batch if sequences % batch == 0 else before.batch_size
        raise CheckpointError(
            f"batch_size={batch} × gradient_accumulation_steps={steps} is {batch * steps} sequences per step, and "
            f"the run in {before.out_dir} has {sequences}. A resumed run may split its steps differently, but not "
            "change their size.", f"--batch_size={works} --gradient_accumulation_steps={sequences // works}")
