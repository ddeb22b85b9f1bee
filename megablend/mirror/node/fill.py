"""Fetches pages at once, whatever their due times, for `megablend node fill`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from megablend.errors import ResourceError
from megablend.mirror.disk.pages import count_bytes, merge_rows, split_portions
from megablend.mirror.disk.room import Need
from megablend.mirror.node.engine import Engine, Want
from megablend.storage.hints import Filled

_NUM_FETCHERS = 16


async def fill(engine: Engine, needs: Iterable[Need], *, is_dry: bool) -> Filled:
    """Fetch all pages of the given needs. If `is_dry`, only count their bytes."""
    filled = Filled()
    portions: list[Want] = []
    for need in needs:
        pages = merge_rows(need.pages)
        missing = await engine.call(engine.store.missing, need.key, pages)
        filled = filled.plus(
            Filled(
                needed=count_bytes(pages, need.key.size),
                missing=count_bytes(missing, need.key.size),
            )
        )
        portions += [Want(need.key, portion) for portion in split_portions(missing)]
    if is_dry:
        return filled
    remaining = iter(portions)

    async def fetch() -> None:
        nonlocal filled
        for portion in remaining:
            fetched = await _fetch(engine, portion)
            filled = filled.plus(fetched)

    await asyncio.gather(*(fetch() for _ in range(_NUM_FETCHERS)))
    return filled


async def _fetch(engine: Engine, portion: Want) -> Filled:
    try:
        origins = await engine.obtain(portion)
    except ResourceError:
        return Filled(refused=count_bytes(portion.pages, portion.key.size))
    return Filled(source=origins.source, peers=origins.peers)
