"""The worker: scheduler, KV cache and model. Imports `common`, `kernels` and the stubs; never `router`."""

import os

# Threads of PyTorch's OpenMP spin for milliseconds between two operations, and beside a busy router or another worker
# each operation waits for a spinning core (measured on 2 cores: 5 to 10 times slower steps). Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
