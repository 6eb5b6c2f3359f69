"""``/pretrain_gpt2.py`` of the image: Megatron-LM v1.1.5, for your own copies of upstream's scripts."""

from tridock.train.megatron_lm.upstream import main

main()
