"""One training run: supervisor, worker, loop, checkpoints, recovery from out of memory."""
