from __future__ import annotations

import os

# One thread, here and in every process a test starts: sums then come out in one order, so that runs can be compared
# bit for bit; and tests are small, more threads would only fight each other.
os.environ["OMP_NUM_THREADS"] = "1"
