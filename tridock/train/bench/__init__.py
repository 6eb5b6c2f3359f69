"""Programs that a benchmark runs: the plain PyTorch loop and the data parallel trainer."""
