"""Hosts and what they say; keys, and commands inside their nodes."""
