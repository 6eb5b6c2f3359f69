"""Input files: opened by content, read as whole lines, checked as documents."""
