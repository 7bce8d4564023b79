"""Protos of other projects, under their own packages: names and numbers are theirs."""
