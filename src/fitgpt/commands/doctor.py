"""`fitgpt doctor`: what is on this machine, what is wrong with it, and the command that fixes it."""

from __future__ import annotations

import json
from dataclasses import asdict

from .. import __version__
from ..config.architectures import GPTConfig
from ..config.command_options import DoctorOptions
from ..config.run_config import RunConfig
from ..core.errors import DeviceError
from ..hardware.diagnostics import TRAINING, Finding, examine
from ..show.diagnosis_text import print_finding

SCHEMA = 1
CHECKPOINT_BYTES = 12 * GPTConfig().count_params()  # float32 weights and AdamW's two moments
CHECKPOINTS = RunConfig.keep_last + 2               # those, the best one, and one being written


def doctor(options: DoctorOptions) -> int:
    """5 where something is wrong, for example a GPU that torch cannot use; else 0, also where torch is not installed,
    because planning needs none."""
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
