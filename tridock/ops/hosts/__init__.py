"""Hosts and their nodes: sessions, facts, containers, image, keys."""
