"""Numbers that a plain path and its fused kernel must agree on."""

IGNORED = -1          # a target that counts for nothing: nanoGPT's ignore_index
NORM_EPSILON = 1e-5   # of the layer norms, as in GPT-2
ADAMW_EPSILON = 1e-8  # of AdamW for rounded things
