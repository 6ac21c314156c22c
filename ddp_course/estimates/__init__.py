"""Formulas for what training takes: memory, traffic, time."""
