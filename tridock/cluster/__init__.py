"""The cluster: hostfile, settings, key material and ssh's files. Nothing here contacts a host."""
