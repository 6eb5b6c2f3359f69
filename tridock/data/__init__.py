"""Text to Megatron's indexed data sets, and the tokenizer that makes them."""
