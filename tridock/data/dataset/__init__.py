"""Megatron's indexed data sets: the format, and what reads, merges, splits, verifies and inspects them."""
