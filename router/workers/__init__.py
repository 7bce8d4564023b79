"""The workers' addresses, and the Session with each worker."""
