"""Generated gRPC stubs of KEDA's external scaler."""
