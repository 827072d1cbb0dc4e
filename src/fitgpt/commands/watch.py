"""`fitgpt watch`: what a GPU and the run on it are doing, from the driver and the run's folder."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

from ..config.command_options import WatchOptions
from ..runs.watch import Watcher, WatchFrame, has_ended
from ..show.watch_text import open_screen


def watch(options: WatchOptions) -> int:
    """Shows frames until the run ends. Ctrl-C is the usual way to stop, so it exits with 0 too."""
    watcher = Watcher(options.target)
    try:
        with nullcontext(_print_json) if options.json else open_screen(moving=not options.once) as show:
            while True:
                frame = watcher.read()
                show(frame)
                if options.once or has_ended(frame.run):
                    return 0
                time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


def _print_json(frame: WatchFrame) -> None:
    print(json.dumps(frame.to_json(), allow_nan=False), flush=True)
