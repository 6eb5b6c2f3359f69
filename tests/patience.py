"""How long tests wait for what is sure to come. These limits only end a test that hangs; they judge nothing.

A machine may be many times slower than another, and busy, so they are wide. What a test measures or provokes in seconds
(a limit of the product that is its subject) stands as a number in that test.
"""

STEP_S = 600
"""One command, one event, one answer."""
WORK_S = 3600
"""A run, a build, a download. pytest's own ``timeout`` in pyproject.toml is as long."""
MATRIX_S = 4 * WORK_S
"""The few tests that are many runs, one after the other, where all cases are asked for."""
