"""The tape of our own trainer: the engine's own files, run on tensors that have shapes and no data."""
