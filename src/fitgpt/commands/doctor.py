"""`fitgpt doctor`: what is on this machine, what is wrong with it, and the command that fixes it; or whether the shards
of a dataset match their checksums.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from .. import __version__
from ..config.architectures import GPTConfig
from ..config.command_options import DoctorOptions
from ..config.run_config import RunConfig
from ..core.errors import DeviceError
from ..core.units import show_bytes
from ..hardware.diagnostics import TRAINING, Finding, examine
from ..show.diagnosis_text import print_finding

SCHEMA = 1
CHECKPOINT_BYTES = 12 * GPTConfig().count_params()  # float32 weights and AdamW's two moments
CHECKPOINTS = RunConfig.keep_last + 2               # those, the best one, and one being written


def doctor(options: DoctorOptions) -> int:
    """5 where something is wrong, for example a GPU that torch cannot use; else 0, also where torch is not installed,
    because planning needs none. With a dataset, 3 if a shard of it is damaged."""
    if options.dataset:
        return verify_dataset(options)
    found: list[Finding] = []
    for finding in examine(CHECKPOINT_BYTES, CHECKPOINTS):
        found.append(finding)
        if not options.json:
            print_finding(finding)
    wrong = any(finding.verdict == "wrong" for finding in found)
    trains = not wrong and not any(finding.subject == TRAINING for finding in found)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fitgpt": __version__, "trains": trains,
                          "findings": [asdict(finding) for finding in found]}))
    else:
        print("\nTraining can run here." if trains else "\nTraining cannot run here. Fix what is marked wrong first."
              if wrong else "\nPlanning works here.")
    return DeviceError.exit_code if wrong else 0


def verify_dataset(options: DoctorOptions) -> int:
    """Reads every shard, whatever was verified before; DataError names those that do not match their checksum."""
    from ..data.dataset import open_dataset  # imports numpy, which planning does without

    dataset = open_dataset(options.dataset)
    dataset.verify(2**32, lambda sentence: print(sentence, file=sys.stderr, flush=True), fresh=True)
    shards = [shard for split in dataset.splits.values() for shard in split.shards]
    checked = all(shard.sha256 for shard in shards)
    what = (f"{len(shards):,} shards, {show_bytes(sum(shard.size for shard in shards))}: "
            + ("every checksum matches" if checked else "readable; nanoGPT's files have no checksums"))
    finding = Finding("ok" if checked else "note", "dataset", what)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "fitgpt": __version__, "findings": [asdict(finding)]}))
    else:
        print_finding(finding)
    return 0
