"""fitgpt trains small GPTs on the card you have. `plan` says what a run will hold; `GPT` loads torch when asked for."""
# Imports nothing, not even typing: __main__.py has to clean the import path first.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .commands.plan import plan
    from .engine.model import GPT
    from .nouns import GPTConfig

__version__ = "0.1.0"
__all__ = ["GPT", "GPTConfig", "__version__", "plan"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    if name == "GPT":
        from .engine.model import GPT

        return GPT
    if name == "GPTConfig":
        from .nouns import GPTConfig

        return GPTConfig
    if name == "plan":
        from .commands.plan import plan

        return plan
    raise AttributeError(f"module 'fitgpt' has no attribute {name!r}")
