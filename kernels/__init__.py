"""Kernel back ends behind one interface. Imports nothing of ours."""
