"""The nodes of a cluster: its image on every host, one container each, up and down."""
