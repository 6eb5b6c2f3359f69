"""Turns text into Megatron's indexed data sets, and trains and loads tokenizers."""
