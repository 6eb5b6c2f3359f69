"""A node's reports about itself for the doctor and the preflight: devices, interfaces, ports, limits, code."""
