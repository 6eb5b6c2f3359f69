"""Code that runs on the ranks: the training loop, and the programs of all engines."""
