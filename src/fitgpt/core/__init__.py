"""Errors, units, files, version: what every other package may import. Standard library only."""
