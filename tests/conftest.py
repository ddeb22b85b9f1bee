"""Scripts that tests start find the project, and the package of its tests."""

import os
from pathlib import Path

ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
