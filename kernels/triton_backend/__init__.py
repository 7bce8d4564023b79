"""Our own Triton kernels: one source for ROCm and CUDA, interpreted on a CPU where TRITON_INTERPRET=1 is set."""
