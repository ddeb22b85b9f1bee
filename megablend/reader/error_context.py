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
from megablend.prefetch.windows import WINDOW_SAMPLES
from megablend.run.run import Run


def name_sample(run: Run, ks: Sequence[int], error: DataError) -> DataError:
    """Return an error like `error` that also names the first sample that needs the damaged block,
    or any block of the file, among `ks` and the samples that may have been read ahead with them,
    and the sample's source. It contains a remedy."""
    ahead = range(ks[-1] + 1, min(ks[-1] + 1 + WINDOW_SAMPLES, run.num_samples))
    samples = [*ks, *ahead]
    snapshot = run.store.snapshot
    try:
        sources, ordinals = run.plan.locate_many(samples)
        spans = run.locate_spans(sources, ordinals)
        files = snapshot.file_of(spans.blocks)
        blocks = snapshot.blocks(spans.blocks)
    except MegablendError:  # the cache is also damaged
        return error
    for file in dict.fromkeys(files.tolist()):
        column = snapshot.columns[int(snapshot.files.columns[file])]
        path = snapshot.path(file, run.store.roots)
        if error.path not in column.kind.files(path):
            continue
        is_needed = files == file
        if error.path == path and error.offset is not None:
            starts = blocks["offset"]
            stops = starts + blocks["stored_bytes"]
            is_damaged = is_needed & (starts <= error.offset) & (error.offset < stops)
            is_needed = is_damaged if is_damaged.any() else is_needed
        sample = samples[int(spans.rows[is_needed.argmax()])]
        needed = f"needed for sample {sample:,} of {run.split}, source {column.source_name!r}"
        if isinstance(error, MissingFileError | ChangedFileError | CorruptFileError):
            needed += "; restore the file and resume; `megablend check CONFIG` lists all files that are missing or changed; "
            needed += WITHOUT_IT
        # Other errors, such as an outage or expired credentials, already say what to do
        return type(error)(error.path, f"{error.problem} ({needed})", offset=error.offset)
    return error
