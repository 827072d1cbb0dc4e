"""What every package may import: standard library only."""
