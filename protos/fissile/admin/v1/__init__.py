"""Generated gRPC stubs of Fissile."""
