"""Arrow IPC streams, as Hugging Face's `save_to_disk` writes them: each record batch is a block."""

from megablend.formats.arrow_stream.stream_format import ARROW_STREAM

__all__ = ["ARROW_STREAM"]
