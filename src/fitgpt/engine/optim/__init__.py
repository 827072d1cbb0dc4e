"""The optimizers: AdamW, 8-bit AdamW, Muon, CPU offload, bitsandbytes."""
