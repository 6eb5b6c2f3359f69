"""Tokenizers: training, loading, and encoding in several processes."""
