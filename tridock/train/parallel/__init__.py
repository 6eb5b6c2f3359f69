"""Parallel strategies of engine torch: DDP, ZeRO, FSDP2, tensor and pipeline parallelism."""
