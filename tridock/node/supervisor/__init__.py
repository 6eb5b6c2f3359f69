"""The supervisor of a run: one process on the head that starts the ranks, watches every node and restarts the run."""
