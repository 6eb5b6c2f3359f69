"""Image distribution: selects a cluster's image and brings it to the hosts layer by layer, without a registry."""
