"""Data that routers and workers must compute alike: hashes, digests, ids and proto conversions."""
