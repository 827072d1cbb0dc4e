"""Entry point of `fitgpt` and `python -m fitgpt`: cleans the import path, then runs the command.

Nothing may be imported from the current directory: a cloned repository may contain a json.py or a torch.py. Until the
path is clean, only modules that Python itself has already loaded are imported; `fitgpt/__init__.py` imports nothing.
"""

import os
import sys


def main() -> int:
    before = dict(os.environ)
    warning = clean_import_path()
    from .commands.main import main as run_command
    from .core import environment

    environment.given = {name: before.get(name) for name in environment.CHANGED}

    return run_command(warning=warning)


def clean_import_path() -> tuple[str, str]:
    """Removes the current directory and relative entries of PYTHONPATH, also for child processes. Returns a warning
    about such entries and its fix, empty if there were none."""
    os.environ["PYTHONSAFEPATH"] = "1"  # for processes that libraries start: multiprocessing, torch's compiler
    try:
        here = os.getcwd()
    except OSError:  # a directory that was removed holds nothing to import
        return "", ""
    if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == here:
        del sys.path[0]  # put there by `python -m`
    listed = os.environ.get("PYTHONPATH")
    entries = listed.split(os.pathsep) if listed else []
    absolute = [entry for entry in entries if os.path.isabs(entry)]
    relative = [entry for entry in entries if not os.path.isabs(entry)]
    dropped = {os.path.abspath(entry) for entry in relative} - {os.path.abspath(entry) for entry in absolute}
    sys.path[:] = [path for path in sys.path if path not in dropped]  # site.py has made entries absolute

    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if home not in sys.path:  # not installed: child processes must find fitgpt where this one did
        absolute.insert(0, home)
    if absolute:
        os.environ["PYTHONPATH"] = os.pathsep.join(absolute)
    else:
        os.environ.pop("PYTHONPATH", None)
    if not relative:
        return "", ""
    from shlex import quote

    fixed = [path for path in map(os.path.abspath, entries) if path != here and os.path.exists(path)]
    return (f"PYTHONPATH={listed!r} has relative entries, which are ignored: fitgpt imports nothing from the current "
            "directory.", f"export PYTHONPATH={quote(os.pathsep.join(fixed))}" if fixed else "unset PYTHONPATH")


if __name__ == "__main__":
    raise SystemExit(main())
