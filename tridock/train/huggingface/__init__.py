"""Weights of Hugging Face: export of a checkpoint, the beginning of a run, and samples of text."""
