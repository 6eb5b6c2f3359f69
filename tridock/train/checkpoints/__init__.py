"""Checkpoints: atomic saves, the choice of the newest complete one, loading on another layout."""
