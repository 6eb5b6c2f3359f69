"""A rank as a process: rendezvous, signals, logs, metrics, exit code."""
