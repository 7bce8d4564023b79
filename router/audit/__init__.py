"""Audits: finished answers and KV blocks are compared between workers, and a wrong worker is cordoned."""
