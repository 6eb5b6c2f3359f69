"""What sends a run's records to services, outside of its ranks: trackers and notifications."""
