"""Arrow IPC files: each record batch is a block."""

from megablend.formats.arrow.reader import ARROW

__all__ = ["ARROW"]
