"""Converts grammars in GBNF, llama.cpp's format, to the library's dialect of Lark."""
