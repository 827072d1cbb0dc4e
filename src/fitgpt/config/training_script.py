"""Text of a Python file → whether it is a training script, which `fitgpt trace` runs, and not a config file."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress

from ..core.files import open_regular

MAX_READ = 2**20  # bytes of a file that are searched; imports come first

# torch, what belongs to it (torchvision, torch_geometric), and packages that need it.
_PACKAGES = (r"(?:torch\w*|pytorch_\w+|lightning\w*|transformers|accelerate|trl|peft|diffusers|timm|bitsandbytes|"
             r"deepspeed|sentence_transformers|unsloth\w*|liger_kernel|flash_attn|xformers|fastai|ultralytics)")
# Not ast: a text may be pasted in part, come from a notebook, or be cut at MAX_READ.
_IMPORT = re.compile(rf"^[ \t]*(?:from[ \t]+{_PACKAGES}\b[\w.]*[ \t]+import\b|"
                     rf"import[ \t](?:[\w. \t]+,)*[ \t]*{_PACKAGES}\b)", re.MULTILINE)


def imports_torch(text: str) -> bool:
    """Whether a line imports torch or a package that needs it. A docstring may have such a line, too."""
    return _IMPORT.search(text) is not None


def is_training_script(path: str) -> bool:
    """`imports_torch` of a file; False if it cannot be read. Nothing is executed."""
    with suppress(OSError, ValueError), open_regular(path) as file:
        return imports_torch(file.read(MAX_READ).decode("utf-8", "replace"))
    return False


def trace_command(script: str, gpu: str = "") -> str:
    """The command that forecasts the memory of a script; without a GPU, one with an example."""
    return shlex.join(["fitgpt", "trace", "--gpu", gpu or "4070", script])
