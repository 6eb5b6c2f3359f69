"""What a node answers about itself: devices, interfaces, ports, limits, code; asked by the doctor and the preflight."""
