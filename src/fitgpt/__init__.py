"""fitgpt plans, fits, trains and explains GPT training runs on consumer GPUs. `GPT`, `load`, `train`, `trace`
and `estimate` need torch."""
# Imports nothing, not even typing: __main__.py has to clean the import path first.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config.architectures import GPTConfig
    from .diagnosis import explain
    from .engine.model import GPT
    from .planning.fit import fit
    from .planning.plan import plan
    from .tracing.trace import estimate, trace
    from .training.supervisor import train
    from .training.trained_model import load

__version__ = "0.1.0"
__all__ = ["GPT", "GPTConfig", "__version__", "estimate", "explain", "fit", "load", "plan", "trace", "train"]

# Where each public name is defined: imported when it is first used.
_MODULES = {
    "GPT": "engine.model",
    "GPTConfig": "config.architectures",
    "estimate": "tracing.trace",
    "explain": "diagnosis",
    "fit": "planning.fit",
    "load": "training.trained_model",
    "plan": "planning.plan",
    "trace": "tracing.trace",
    "train": "training.supervisor",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'fitgpt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"fitgpt.{_MODULES[name]}"), name)
