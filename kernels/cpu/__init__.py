"""The CPU back end: kernels of our own in C++ (kernels/cpu/native), compiled when the package is installed."""
