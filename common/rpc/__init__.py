"""gRPC server shell: health, reflection, drain; errors as statuses; refusal of fields that are not served."""
