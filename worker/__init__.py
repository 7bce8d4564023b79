"""The worker: scheduler, KV cache and model. Imports `common`, `kernels` and the stubs; never `router`."""
