"""Compares a repeated run with the original: the environment field by field, the losses number by number (pure)."""
