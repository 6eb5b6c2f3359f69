"""Lets code that was written for CUDA, apex and the torch of its day run on the twin and on today's torch.

Nothing here touches a thing that is there: what is replaced is what is missing, and every replacement is named.
"""

from tridock.compat.switch import install

__all__ = ["install"]
