"""Generated gRPC stubs of vLLM's native services."""
