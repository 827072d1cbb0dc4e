"""What a run will hold in GPU memory, computed from its config alone: no torch, no numpy, milliseconds."""
