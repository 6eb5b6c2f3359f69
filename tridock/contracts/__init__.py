"""What two processes or two rooms agree on, as typed data. Standard library only; imports nothing above it."""
