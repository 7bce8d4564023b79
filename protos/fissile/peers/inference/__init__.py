"""Generated gRPC stubs of the Open Inference Protocol."""
