"""Options that several commands share, and printing JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from megablend.api.result_base import Record

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
in_cache = click.option("--cache", metavar="CACHE", help="Folder or URL of the cache, in place of the config's.")
of_run = click.option("--run", metavar="NAME", help="Name of a run in the cache, in place of the config's.")
of_split = click.option("--split", default="train", show_default=True, help="train, valid or test.")


def print_json(value: Record | Mapping[str, Any]) -> None:
    """Print one JSON object on one line: a result, or a dict of what JSON has."""
    click.echo(json.dumps(value.to_dict() if isinstance(value, Record) else value))
