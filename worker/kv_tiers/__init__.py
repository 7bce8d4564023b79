"""Tiers below the KV block pool: host memory, files and stores that hold cached blocks."""
