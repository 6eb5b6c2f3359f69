"""Engine ``torch``: the GPT and ResNet-50 of tridock.train."""
