"""The cluster: hostfile, settings, keys and ssh files. Contacts no host."""
