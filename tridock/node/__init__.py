"""Code that runs inside a node beside the ranks. Uses only the standard library, and starts quickly.

``python -m tridock.node VERB``: start, watch, follow, processes, stop, runs, rank-logs, evidence, preflight;
for the doctor node-report, mesh-probe, mesh-respond, host-key.
"""
