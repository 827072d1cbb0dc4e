"""Why GPU memory ran out, or what it is used for: a message, nvidia-smi's output, figures, a plan or a run → Diagnosis.

In order: input (what was given); oom_message, nvidia_smi (text → figures); case (figures and config → what is known);
rules (causes); diagnose, reading, plan_or_run (→ Diagnosis).
"""

from .input import explain

__all__ = ["explain"]
