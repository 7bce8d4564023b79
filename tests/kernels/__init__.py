"""The Triton and AITER back ends, without a GPU: interpreted, compiled for the targets, bound against signatures.

A package of its own, since Triton reads TRITON_INTERPRET once, when its kernels are imported.
"""
