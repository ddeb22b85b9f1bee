"""The package's logger, silent unless the program configures logging. `import megablend` alone does
not load `logging`."""

from __future__ import annotations

import logging

LOG = logging.getLogger("megablend")
LOG.addHandler(logging.NullHandler())
