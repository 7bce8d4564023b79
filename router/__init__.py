"""The router: tokenizes, admits and shards requests. Imports `common` and the stubs; never `worker`."""
