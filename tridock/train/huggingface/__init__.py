"""Hugging Face weights: exports a checkpoint, loads weights to start a run, and generates text."""
