"""``python -m tridock.cli``: the command ``tridock``."""

import sys

from tridock.cli import main

sys.exit(main())
