"""A run's folder, seen from outside: its lock, its metrics, the record of a run, watching it. Never imports torch."""
