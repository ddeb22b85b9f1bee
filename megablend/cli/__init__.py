"""The command line: build, describe, show, verify, gc, megatron-cache."""

from megablend.cli.main import main

__all__ = ["main"]
