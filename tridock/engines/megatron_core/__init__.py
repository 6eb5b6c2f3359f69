"""Engine ``megatron-core``: NVIDIA's package in the training loop of tridock.train."""
