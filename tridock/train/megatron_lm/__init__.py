"""Engine megatron-deepspeed: Megatron-LM v1.1.5 under Tridock's records and checkpoints."""
