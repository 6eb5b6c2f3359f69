"""The image: which one a cluster runs, and how it reaches the hosts, layer by layer, without a registry."""
