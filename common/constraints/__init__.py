"""Constraints of answers: from a schema, an expression or a grammar to the one text that workers compile."""
