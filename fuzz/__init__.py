"""Fuzzing: what outsiders may hand to elsa."""
