"""Campaigns: what docs/reliability.md promises, tried in thousands of cases. `python -m tests.campaign --help`."""
