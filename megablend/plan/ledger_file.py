"""Ledger files: `runs/<name>.json` in the cache, written only by `build` and replaced atomically."""

from __future__ import annotations

from pathlib import Path

from megablend.errors import CacheError
from megablend.fs.atomic_write import flush_folder, list_committed, reading, replace_file, translate_os_errors
from megablend.plan.ledger import Ledger
from megablend.plan.ledger_format import REMEDY, dump_ledger, parse_ledger
from megablend.system.failures import cause_of, remedy_of
from megablend.system.limited_json import parse_json


def ledger_path(cache: str, run: str) -> Path:
    """The path of a run's ledger."""
    return Path(cache) / "runs" / f"{run}.json"


def load_ledger(cache: str, run: str) -> Ledger | None:
    """The run's ledger, or None where the run was never built.

    Raises: CacheError where the file cannot be read or is damaged, or where it or its plan has a newer version.
    """
    path = ledger_path(cache, run)
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(
            f"{path}: cannot read the run's ledger ({cause_of(error)}): {remedy_of(error.errno)}"
        ) from error
    except ValueError as error:
        raise CacheError(f"{path}: cannot read the run's ledger: {error}; {REMEDY}") from None
    try:
        name, stages = parse_ledger(record)
    except ValueError as error:
        raise CacheError(f"{path}: {error}") from None
    return Ledger(run=name, stages=stages)


def save_ledger(cache: str, ledger: Ledger) -> None:
    """Replace the run's ledger atomically. Raises CacheError where it cannot be written."""
    path = ledger_path(cache, ledger.run)
    with translate_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, dump_ledger(ledger.run, ledger.stages).encode())
    flush_folder(path.parent)  # a committed ledger must survive a power failure


def run_names(cache: str) -> list[str]:
    """The names of all runs, sorted."""
    folder = Path(cache) / "runs"
    with reading(folder):
        return [name.removesuffix(".json") for name in list_committed(folder) if name.endswith(".json")]


def list_runs(cache: str) -> list[Ledger]:
    """The ledgers of all runs, sorted by name. Raises CacheError as `load_ledger` does."""
    return [ledger for name in run_names(cache) if (ledger := load_ledger(cache, name)) is not None]
