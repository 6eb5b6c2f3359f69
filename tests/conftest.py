"""What holds for every test."""

from hypothesis import settings

# How long an example takes depends on what else the machine does: a deadline would fail good code.
settings.register_profile("tridock", deadline=None)
settings.load_profile("tridock")
