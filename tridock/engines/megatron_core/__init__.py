"""Engine ``megatron-core``: NVIDIA's package under the training loop of tridock.train."""
