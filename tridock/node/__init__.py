"""Code that runs inside a node beside the ranks: standard library only, quick to start.

``python -m tridock.node VERB``: start, watch, follow, processes, stop, runs, rank-logs, evidence, preflight;
for the doctor node-report, mesh-probe, mesh-respond, host-key.
"""
