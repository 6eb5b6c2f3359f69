"""Engine ``megatron-core``: NVIDIA's package under Tridock's training loop.

Modules here import megatron-core; :mod:`tridock.train.megatron_core.pretrain_gpt` prepares the machine for it first.
"""
