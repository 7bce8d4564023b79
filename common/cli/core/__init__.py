"""Shared parts of the commands: options, errors, output, and the call of a router."""
