"""Grammars in GBNF, the form that llama.cpp has, as grammars of the library."""
