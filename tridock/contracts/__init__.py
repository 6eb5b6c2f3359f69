"""Typed data that two processes or two packages share. Standard library only; imports nothing above it."""
