"""What is wrong with a node: pure findings from what nodes and hosts answer, and the quick checks of every launch."""
