"""Which settings are the fastest that fit a card, and why: no torch, in seconds."""
