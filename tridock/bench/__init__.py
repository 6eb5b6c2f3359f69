"""Benchmarks: a matrix of experiments on one machine, each measured several times alongside a bare PyTorch loop."""
