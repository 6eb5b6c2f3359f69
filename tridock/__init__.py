"""Tridock turns a list of Docker hosts into one 3D-parallel GPT training machine."""

__version__ = "0.1.0"
