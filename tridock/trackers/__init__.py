"""Sends a run's records to services, outside its ranks: trackers and notifications."""
