"""gRPC server shell: TLS, health, reflection, drain."""
