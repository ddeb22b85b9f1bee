"""The contract of every format: the same documents give the same tokens, rows and ends,
and errors name the file.

class TestMyFormat(FormatContract):
    format = MyFormat()
    suffix = ".mine"
    column = "ids"

    def write(self, path, documents):
        ...
"""

from __future__ import annotations

from megablend.testing.format_failures import FormatFailures
from megablend.testing.format_reading import FormatReading


class FormatContract(FormatReading, FormatFailures):
    """The tests of a format. Subclass this class, set `format`, `suffix` and what differs from the
    defaults of `FormatFiles`, and override `write`."""
