"""nanoGPT's checkpoints and Hugging Face's folders, in and out."""
