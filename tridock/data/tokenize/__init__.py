"""Tokenizers: trained, loaded, and run on several processes."""
