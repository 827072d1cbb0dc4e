"""Any PyTorch training code → the tape of its GPU memory, without a GPU: `trace.py` is the interface."""
