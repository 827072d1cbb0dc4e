"""Decide: will a run fit, how fast is it, and with which settings."""
