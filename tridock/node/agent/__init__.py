"""The node agent: watches and ends the ranks of one node, and reports on its runs."""
