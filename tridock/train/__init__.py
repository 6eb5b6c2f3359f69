"""Code that runs on the ranks: engine ``torch``, a compact GPT under DDP or DeepSpeed's ZeRO."""
