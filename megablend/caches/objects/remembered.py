"""The responses of a cache's store, remembered on this node for times when the store does not
respond.

This is only for nodes with a mirror, which keep running while their source is unavailable. Only
listings and versions are remembered, since the node has copies of everything else. Remembered
responses are not used if they could do harm: while the cache is held for writing, and in a job of
several machines, each of which might remember another state of the run. Writing needs the store
anyway, which refuses a version that is not the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megablend.storage.object_options import ObjectOptions
from megablend.storage.objects.prefix import NoResponseError, ObjectEntry, ObjectPrefix
from megablend.system.atomic_write import replace_file
from megablend.system.digest import hex_digest
from megablend.system.limited_json import parse_json
from megablend.system.log import LOG
from megablend.system.safe_open import read_regular

_ANSWERS = ".answers"
_WAIT_SECONDS = 15.0
"""The time to wait for a response from a store whose last response is remembered."""
_AWAY_SECONDS = 60.0
"""The time for which no request is sent to such a store after it has failed to respond."""
_LOCAL_SIZES = {
    "WORLD_SIZE": "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE": "MPI_LOCALNRANKS",
}
"""Names of environment variables: the variable with the number of processes of a job -> the
variable with the number of these processes on this machine."""


class RememberedPrefix(ObjectPrefix):
    """An ObjectPrefix that remembers the store's responses.

    Args:
        location, options: see ObjectPrefix.
        find_folder: returns this node's folder of the cache.
    """

    def __init__(
        self, location: str, options: ObjectOptions, find_folder: Callable[[], Path]
    ) -> None:
        super().__init__(location, options)
        self._impatient = ObjectPrefix(location, options, seconds=_WAIT_SECONDS)
        """The same prefix with a short timeout, for requests whose last response is remembered."""
        self._find_folder = find_folder
        self._away_until = 0.0
        """The time until which no request is sent to the store, by the monotonic clock."""
        self.is_mirrored = options.mirror is not None and options.mirror.covers(self.location)
        self.is_held = False
        """Whether the cache is held for writing: responses are then neither used nor remembered."""

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """See ObjectPrefix; versions are remembered."""

        def read(prefix: ObjectPrefix) -> list[str | None]:
            contents = ObjectPrefix.read_all(prefix, keys)
            return [None if content is None else content.decode("latin-1") for content in contents]

        if not all(key.endswith(".json") for key in keys):
            return super().read_all(keys)
        answers = self._ask([f"read {key}" for key in keys], read)
        return [None if answer is None else answer.encode("latin-1") for answer in answers]

    def list_objects(self, folder: str = "") -> list[ObjectEntry]:
        """See ObjectPrefix; the listing is remembered."""
        (listed,) = self._ask(
            [f"list {folder}"],
            lambda prefix: [[list(entry) for entry in ObjectPrefix.list_objects(prefix, folder)]],
        )
        return [ObjectEntry(*values) for values in listed]

    def write_all(self, objects: Mapping[str, bytes | Path]) -> dict[str, str]:
        """See ObjectPrefix. Remembered responses are forgotten, since they may be wrong
        afterwards."""
        etags = super().write_all(objects)
        self._forget()
        return etags

    def create_each(self, key: str, data: Sequence[bytes]) -> int:
        """See ObjectPrefix. Remembered responses are forgotten, since they may be wrong
        afterwards."""
        count = super().create_each(key, data)
        self._forget()
        return count

    def _forget(self) -> None:
        if self.is_mirrored:
            shutil.rmtree(self._find_folder() / _ANSWERS, ignore_errors=True)

    def _ask(self, names: Sequence[str], ask: Callable[[ObjectPrefix], list[Any]]) -> list[Any]:
        """Return the store's responses; the remembered responses if the store does not respond.

        Args:
            names: the names under which the responses are remembered.
            ask: requests all responses from the store.

        Raises: the same errors as `ask`.
        """
        if self.is_held or not self.is_mirrored:
            return ask(self)
        folder = self._find_folder() / _ANSWERS
        paths = [folder / hex_digest(name) for name in names]
        remembered = [_load(path) for path in paths]
        is_usable = all(remembered) and is_on_one_machine(os.environ)
        try:
            if is_usable and time.monotonic() < self._away_until:
                raise NoResponseError("the store was not responding a moment ago")
            answers = ask(self._impatient if is_usable else self)
        except NoResponseError:
            if not is_usable:
                raise
            self._note_absence()
            return [boxed[0] for boxed in remembered if boxed]
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            for path, before, answer in zip(paths, remembered, answers, strict=True):
                if before != [answer]:
                    replace_file(path, json.dumps([answer]).encode())
        return answers

    def _note_absence(self) -> None:
        """Record that the store does not respond, and warn once."""
        if time.monotonic() >= self._away_until:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            LOG.warning(
                "cache: %s: the store is not responding; using the cache as this node last saw it",
                self.location,
            )


def is_on_one_machine(environ: Mapping[str, str]) -> bool:
    """Return whether all processes of the job are on this machine, according to the launcher's
    environment variables."""
    return environ.get("SLURM_NNODES", "1") == "1" and all(
        environ.get(size, "1") in ("1", environ.get(local)) for size, local in _LOCAL_SIZES.items()
    )


def _load(path: Path) -> list[Any] | None:
    """Return the response that a file remembers, in a list of length 1, since the response itself
    may be None. Return None if there is no such file, or it is damaged."""
    with suppress(OSError, ValueError):
        known = parse_json(read_regular(path))
        if isinstance(known, list) and len(known) == 1:
            return known
    return None
