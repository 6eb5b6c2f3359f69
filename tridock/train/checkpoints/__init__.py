"""Checkpoints: written whole, chosen, loaded on another layout."""
