"""The command line: build, describe, show, verify."""

from megablend.cli.main import main

__all__ = ["main"]
