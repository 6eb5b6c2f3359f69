"""What watches and ends the ranks of one node, and what the node reports about its runs."""
