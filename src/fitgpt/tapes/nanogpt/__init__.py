"""The memory tape of nanoGPT's train.py, eager and compiled."""
