"""Parallel strategies of engine torch: DDP, ZeRO, FSDP2, tensor parallelism, pipelines."""
