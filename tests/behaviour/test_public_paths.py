"""What users import keeps its place: the names of the package, of docs/api.md and of
`megablend.testing` at commit 71d913b."""

from __future__ import annotations

import importlib

import pytest

NAMES = [
    "megablend.BlockBatch",
    "megablend.BlockStore",
    "megablend.BuildResult",
    "megablend.BuiltIndex",
    "megablend.CacheError",
    "megablend.CheckResult",
    "megablend.Config",
    "megablend.ConfigError",
    "megablend.DataError",
    "megablend.Dataset",
    "megablend.LaunchError",
    "megablend.Loader",
    "megablend.MegablendError",
    "megablend.PlanError",
    "megablend.PretrainingSampler",
    "megablend.ResourceError",
    "megablend.StateError",
    "megablend.TransformError",
    "megablend.amend",
    "megablend.api.build.BuildResult",
    "megablend.api.build.BuiltIndex",
    "megablend.api.check.CheckResult",
    "megablend.api.check_data.CheckDataResult",
    "megablend.api.description",
    "megablend.api.gc.GcResult",
    "megablend.api.manage_runs.DamagedRun",
    "megablend.api.manage_runs.RunCommitment",
    "megablend.api.manage_runs.RunSummary",
    "megablend.api.show.Piece",
    "megablend.api.show.SampleDescription",
    "megablend.api.show.StepDescription",
    "megablend.api.verify.VerifyResult",
    "megablend.build",
    "megablend.build_index",
    "megablend.check",
    "megablend.describe",
    "megablend.diff",
    "megablend.errors",
    "megablend.export",
    "megablend.find",
    "megablend.gc",
    "megablend.inspect.description",
    "megablend.inspect.show.Piece",
    "megablend.inspect.show.SampleDescription",
    "megablend.inspect.show.StepDescription",
    "megablend.list_runs",
    "megablend.list_skips",
    "megablend.load_config",
    "megablend.megatron.MegablendDatasetBuilder",
    "megablend.megatron.MegablendDatasetConfig",
    "megablend.megatron.MegablendGPTDataset",
    "megablend.open",
    "megablend.open_index",
    "megablend.operations.build.BuildResult",
    "megablend.operations.build.BuiltIndex",
    "megablend.operations.check.CheckResult",
    "megablend.operations.check_data.CheckDataResult",
    "megablend.operations.gc.GcResult",
    "megablend.operations.manage_runs.DamagedRun",
    "megablend.operations.manage_runs.RunCommitment",
    "megablend.operations.manage_runs.RunSummary",
    "megablend.operations.verify.VerifyResult",
    "megablend.remove_run",
    "megablend.rename_run",
    "megablend.reset_run",
    "megablend.show",
    "megablend.show_run",
    "megablend.show_step",
    "megablend.skip",
    "megablend.testing.concurrency.run_threads",
    "megablend.testing.concurrency.succeeds_in_a_fork",
    "megablend.testing.documents.join_pieces",
    "megablend.testing.documents.list_pieces",
    "megablend.testing.expect.expect_error",
    "megablend.testing.expect.raises",
    "megablend.testing.format_failures.FormatFailures",
    "megablend.testing.format_files.FormatFiles",
    "megablend.testing.format_reading.FormatReading",
    "megablend.testing.formats.FormatContract",
    "megablend.testing.interleavings.InterleavingContract",
    "megablend.testing.moved.MovedStorage",
    "megablend.testing.orders.ListedBlocks",
    "megablend.testing.orders.OrderContract",
    "megablend.testing.orders.list_tokens",
    "megablend.testing.storage_files.StorageFiles",
    "megablend.testing.storage_files.make_content",
    "megablend.testing.storage_finding.StorageFinding",
    "megablend.testing.storage_reading.StorageReading",
    "megablend.testing.storage_reading.allocate",
    "megablend.testing.storage_reading.as_arrays",
    "megablend.testing.storage_reading.check_ranges",
    "megablend.testing.storage_reading.draw_ranges",
    "megablend.testing.storage_reading.list_ranges",
    "megablend.testing.storage_reading.slices",
    "megablend.testing.storages.StorageContract",
    "megablend.unskip",
    "megablend.verify",
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_where_it_was(name: str) -> None:
    owner, _, last = name.rpartition(".")
    try:
        module = importlib.import_module(owner)
    except ModuleNotFoundError:
        pytest.fail(f"{owner} is gone, and with it {name}")
    if not hasattr(module, last):
        importlib.import_module(name)


@pytest.mark.parametrize("group", ["megablend.formats", "megablend.storages"])
def test_other_packages_name_their_entry_points_as_before(group: str) -> None:
    from megablend.formats import registry as formats
    from megablend.storage import registry as storages

    assert group in (formats.ENTRY_POINTS, storages.ENTRY_POINTS)
