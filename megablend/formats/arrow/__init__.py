"""Arrow IPC files, one record batch a block."""

from megablend.formats.arrow.reader import ARROW

__all__ = ["ARROW"]
