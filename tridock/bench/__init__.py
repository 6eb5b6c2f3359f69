"""Benchmarks: a matrix of experiments on one machine, each measured several times beside a bare loop of PyTorch."""
