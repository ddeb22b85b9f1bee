"""Name the sample that needs a data file in the error about that file."""

from __future__ import annotations

from collections.abc import Sequence

from megablend.errors import (
    WITHOUT_IT,
    ChangedFileError,
    CorruptFileError,
    DataError,
    MegablendError,
    MissingFileError,
)
from megablend.run.run import Run


def name_sample(run: Run, ks: Sequence[int], error: DataError) -> DataError:
    """Return an error like `error` that also names the sample that needs the file (the first one of
    `ks`) and the sample's source, and contains a remedy."""
    try:
        sources, ordinals = run.plan.locate_many(ks)
        spans = run.locate_spans(sources, ordinals)
    except MegablendError:  # the cache is also damaged
        return error
    snapshot = run.store.snapshot
    for row, file in zip(spans.rows.tolist(), snapshot.file_of(spans.blocks).tolist(), strict=True):
        column = snapshot.columns[int(snapshot.files.columns[file])]
        if error.path in column.kind.files(snapshot.path(file, run.store.roots)):
            needed = f"needed for sample {ks[row]:,} of {run.split}, source {column.source_name!r}"
            if isinstance(error, MissingFileError | ChangedFileError | CorruptFileError):
                needed += "; restore the file and resume; `megablend check CONFIG` lists all files that are missing or changed; "
                needed += WITHOUT_IT
            # Other errors, such as an outage or expired credentials, already say what to do
            return type(error)(error.path, f"{error.problem} ({needed})", offset=error.offset)
    return error
