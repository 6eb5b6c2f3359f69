"""The logs of a node's ranks and of the launcher, whole or as they grow."""
