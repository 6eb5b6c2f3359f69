"""The doctor: tests a cluster before a run needs it, reports problems, and applies safe fixes."""
