"""Engine ``megatron-deepspeed``: Megatron-LM v1.1.5, with or without DeepSpeed."""
