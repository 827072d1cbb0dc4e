"""Memory tapes: what a training run allocates and frees on the GPU, event by event."""
