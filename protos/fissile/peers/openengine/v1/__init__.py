"""Generated gRPC stubs of OpenEngine."""
