"""Turns texts and conversations into token ids."""
