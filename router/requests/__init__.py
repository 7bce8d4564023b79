"""Requests on their way: each one's stream, and the workers that they run on."""
