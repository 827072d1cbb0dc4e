"""The machine: GPUs, the NVIDIA driver, torch's version. Never imports torch."""
