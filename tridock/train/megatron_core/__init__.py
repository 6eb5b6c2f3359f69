"""Engine ``megatron-core``: NVIDIA's package under Tridock's training loop.

Modules here import megatron-core; :mod:`tridock.train.megatron_core.pretrain_gpt` puts what it misses in place before.
"""
