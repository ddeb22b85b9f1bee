from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.storage.objects.conftest import environments, obstore, swift, swift_server

__all__ = ["environments", "obstore", "swift", "swift_server"]


@pytest.fixture(scope="package")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A torch.distributed job of this process alone."""
    # Imports Megatron, which the quick tests of `exact` do without
    from tests.megatron.reference import process_group

    with process_group(tmp_path_factory.mktemp("store")):
        yield
