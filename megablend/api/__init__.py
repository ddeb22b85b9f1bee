"""Where results were defined up to release 0.1: `megablend.api.build` is `megablend.operations.build`, and so on.

Type hints of users and pickles of results name these modules.
"""

import sys
from importlib import import_module

_MODULES = {
    "build": "megablend.operations.build",
    "check": "megablend.operations.check",
    "check_data": "megablend.operations.check_data",
    "gc": "megablend.operations.gc",
    "manage_runs": "megablend.operations.manage_runs",
    "verify": "megablend.operations.verify",
    "description": "megablend.inspect.description",
    "diff": "megablend.inspect.diff",
    "export": "megablend.inspect.export",
    "find": "megablend.inspect.find",
    "show": "megablend.inspect.show",
}
for _name, _module in _MODULES.items():
    sys.modules[f"{__name__}.{_name}"] = import_module(_module)
