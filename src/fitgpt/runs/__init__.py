"""A run's folder, seen from outside: metrics, lock, plan, record. Never imports torch."""
