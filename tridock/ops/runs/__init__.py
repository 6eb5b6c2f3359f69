"""Runs: prepared, launched, followed, stopped, fetched, reproduced, triaged."""
