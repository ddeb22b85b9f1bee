"""The command line."""

from megablend.cli.main import main

__all__ = ["main"]
