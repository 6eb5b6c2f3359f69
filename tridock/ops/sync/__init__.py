"""Copies data to the nodes with rsync, so that each workspace has the files of the operator's project folder."""
