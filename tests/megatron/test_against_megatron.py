"""Our files beside those of the installed megatron-core, and its builder on ours."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from megatron.core.datasets import gpt_dataset, helpers
from megatron.core.datasets.gpt_dataset import GPTDataset

from megablend.errors import ConfigError, PlanError
from megablend.megatron import MegablendDatasetBuilder, prepare
from tests.megatron.plugin_data import known
from tests.megatron.reference import Case, config_of, draw_case, megatron_build
from tests.pairs import contents, write_pair

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.filterwarnings("ignore:.*pad token id.*:UserWarning"),
]


def check(
    folder: Path, case: Case, monkeypatch: pytest.MonkeyPatch, *, num_samples: int | None = 40
) -> None:
    """Both builders write the same bytes, and Megatron's finds ours complete; samples of a split, or all, are the same."""
    theirs = folder / "theirs"
    ours = folder / "ours"
    expected = megatron_build(config_of(theirs, **case.options), case.sizes)
    report = prepare(config_of(ours, **case.options), case.sizes)
    assert contents(ours) == contents(theirs)
    lengths = {split.name: split.num_samples for split in report.splits}
    for name, dataset in zip(("train", "valid", "test"), expected, strict=True):
        several = dataset if isinstance(dataset, list) else [dataset]
        assert lengths.get(name, 0) == sum(len(each) for each in several if each is not None)
    found = MegablendDatasetBuilder(
        GPTDataset, case.sizes, lambda: True, config_of(ours, **case.options)
    ).build()
    assert_same_splits(found, expected, num_samples)
    # Hundreds of files are closed before they are opened once more
    del found, expected, dataset, several

    def never(*args: Any, **options: Any) -> NoReturn:
        raise AssertionError("Megatron builds what it should have found")

    before = [(path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(ours.iterdir())]
    with monkeypatch.context() as patch:
        patch.setattr(gpt_dataset, "_build_document_index", never)
        patch.setattr(helpers, "build_blending_indices", never)
        patch.setattr(helpers, "build_exhaustive_blending_indices", never)
        megatron_build(config_of(ours, **case.options), case.sizes)
    assert [
        (path.stat().st_mtime_ns, path.stat().st_ino) for path in sorted(ours.iterdir())
    ] == before
    assert prepare(config_of(ours, **case.options), case.sizes).missing == frozenset()


def assert_same_splits(found: list[Any], expected: list[Any], num_samples: int | None) -> None:
    """All or some samples of train, valid and test are the same, bit for bit."""
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, list):
            assert_same_splits(ours, theirs, num_samples)
        elif theirs is None:
            assert ours is None
        else:
            assert len(ours) == len(theirs)
            step = 1 if num_samples is None else max(1, len(theirs) // num_samples)
            for k in range(0, len(theirs), step):
                one = ours[k]
                other = theirs[k]
                assert one.keys() == other.keys()
                for name, value in other.items():
                    assert torch.equal(torch.as_tensor(one[name]), torch.as_tensor(value)), (
                        k,
                        name,
                    )


@pytest.mark.parametrize("seed", range(12))
def test_same_bytes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, draw_case(tmp_path, seed), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 330))
def test_same_bytes_of_many(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path, draw_case(tmp_path, seed), monkeypatch, num_samples=None)


def zipf(folder: Path, num_datasets: int) -> tuple[list[str], list[float]]:
    """Datasets of a few documents, with weights that fall like 1 / rank."""
    rng = np.random.default_rng(0)
    prefixes = [
        write_pair(folder / f"{i}", rng.integers(1, 60, rng.integers(1, 30)))
        for i in range(num_datasets)
    ]
    return prefixes, (1 / np.arange(1, num_datasets + 1)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("num_datasets", [1000, 5000])
def test_thousands_of_datasets(
    num_datasets: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A hundred pairs, each many times: every place in the blend has a weight of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(hard, 12 * num_datasets)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
    except (ValueError, PermissionError):  # only root may raise the hard limit, up to fs.nr_open
        pytest.skip(f"Megatron keeps some {4 * num_datasets} files open; {hard} are allowed")
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    prefixes, _ = zipf(tmp_path, 100)
    weights = (1 / np.arange(1, num_datasets + 1)).tolist()
    options = {
        "blend": (prefixes * (num_datasets // 100), weights),
        "split": "1",
        "mid_level_dataset_surplus": 0.2,
    }
    check(tmp_path, Case(options, [40_000, 0, 0]), monkeypatch)


def test_hundreds_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"blend": zipf(tmp_path, 300), "split": "1", "mid_level_dataset_surplus": 0.05}
    check(tmp_path, Case(options, [20_000, 0, 0]), monkeypatch)


def test_large_enough_for_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries than numpy and plain loops are left with, in all arrays."""
    rng = np.random.default_rng(0)
    prefixes = [write_pair(tmp_path / f"{i}", rng.integers(0, 40, 90_000)) for i in range(2)]
    case = Case(
        {"blend": (prefixes, [0.3, 0.7]), "split": "9,1", "sequence_length": 8},
        [900_000, 100_000, 0],
    )
    check(tmp_path, case, monkeypatch)


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("size", [None, 3, 40])
def test_kept_tails(
    size: int | None, extra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefixes = [write_pair(tmp_path / f"{i}", [5, 9, 1, 30, 2 + i]) for i in range(2)]
    options: dict[str, Any] = {
        "drop_last_partial_validation_sequence": False,
        "add_extra_token_to_sequence": extra,
    }
    for name, blend in (("alone", prefixes[:1]), ("blended", prefixes)):
        case = Case({**options, "blend_per_split": [None, (blend, None), None]}, [0, size, 0])
        check(tmp_path / name, case, monkeypatch)


def test_a_prefix_twice_in_a_blend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_pair(tmp_path / "a", [7] * 50)
    check(
        tmp_path,
        Case({"blend": ([prefix, prefix], [1.0, 1.0]), "split": "1,1"}, [100, 10, 0]),
        monkeypatch,
    )


def test_a_dataset_too_short_for_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_pair(tmp_path / "a", [0, 1, 0])
    check(
        tmp_path, Case({"blend": ([prefix], None), "split": "1"}, [None, None, None]), monkeypatch
    )
    check(
        tmp_path / "many epochs",
        Case({"blend": ([prefix], None), "split": "1"}, [3, None, None]),
        monkeypatch,
    )


NAN = float("nan")
INF = float("inf")
UNUSUAL_WEIGHTS = [
    [0.0],
    [NAN],
    [-1.0],
    [INF],
    [1e-320],
    [0.0, 1.0],
    [-0.0, -1.0],
    [1.0, NAN],
    [2.0, -1.0],
    [1.0, -1.0],
]
UNUSUAL_WEIGHTS += [
    [-1.0, -2.0],
    [-1e308, -1e308],
    [1e308, 1e308],
    [5e-324, 1e-323],
    [INF, 1.0],
    [0.0, 0.0],
]


@pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow) encountered in:RuntimeWarning"
)
@pytest.mark.parametrize("weights", UNUSUAL_WEIGHTS, ids=str)
def test_weights_are_refused_where_megatron_uses_them_and_fails(
    weights: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores those of a prefix by itself and of validation sets apart, and divides all by their sum."""
    prefixes = [write_pair(tmp_path / f"{i}", [7] * 50) for i in range(2)]
    blend = (prefixes[: len(weights)], weights)
    alone = (prefixes[:1], None)
    cases: dict[str, dict[str, Any]] = {
        "all splits": {"blend": blend, "split": "8,1,1"},
        "train": {"blend_per_split": [blend, None, None]},
        "apart": {"blend_per_split": [alone, blend, None], "multiple_validation_sets": True},
        "test": {"blend_per_split": [alone, None, blend], "multiple_validation_sets": True},
    }
    for name, options in cases.items():
        sizes = [40, 5, 5]
        try:
            megatron_build(config_of(tmp_path / name / "found", **known(options)), sizes)
        except AssertionError:
            with pytest.raises(
                ConfigError,
                match=r"has weight .*; expected a number above 0|: weight .* gives a share that rounds to 0",
            ):
                prepare(config_of(tmp_path / name / "ours", **options), sizes)
        else:
            check(tmp_path / name, Case(options, list(sizes)), monkeypatch)


class LoopError(Exception):
    """Megatron counts epochs for ever."""


@pytest.mark.parametrize("size", [None, 7])
def test_full_validation_over_one_set_of_several(
    size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron takes a number of samples where the validation sets are only one."""
    train = write_pair(tmp_path / "train", [5] * 9)
    valid = write_pair(tmp_path / "valid", [7] * 11)
    blends: dict[str, Any] = {"blend_per_split": [([train], None), ([valid], None), None]}
    options = known(
        {**blends, "multiple_validation_sets": True, "full_validation": True, "sequence_length": 8}
    )
    check(tmp_path, Case(options, [9, size, 0]), monkeypatch)


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize(("size", "kept"), [(None, False), (None, True), (0, False), (2, True)])
def test_parts_without_tokens_are_refused_where_megatron_fails(
    size: int | None, kept: bool, extra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some documents, of all, and of none; by themselves, among several validation sets, and in a blend by lengths."""
    whole = write_pair(tmp_path / "whole", [5] * 9)
    parts = write_pair(tmp_path / "parts", [0, 9, 0, 20])
    empty = write_pair(tmp_path / "empty", [0, 0])
    blends: dict[str, Any] = {"blend_per_split": [([whole], None), ([whole, empty], None), None]}
    cases: list[tuple[dict[str, Any], list[int | None]]] = [
        ({"blend": ([parts], None), "split": split}, [None, size, 0])
        for split in ("25,25,50", "98,1,1")
    ]
    cases += [
        (
            known({**blends, "multiple_validation_sets": True, "full_validation": size is None}),
            [9, size, 0],
        )
    ]
    if size is None:
        cases += [(blends, [9, size, 0])]
    flags = {
        "drop_last_partial_validation_sequence": not kept,
        "add_extra_token_to_sequence": extra,
    }
    for number, (own, sizes) in enumerate(cases):
        for length in (1, 16):
            folder = tmp_path / f"{number}-{length}"
            options: dict[str, Any] = {
                **own,
                **flags,
                "sequence_length": length,
                "mmap_bin_files": False,
            }
            outcome = outcome_of_megatron(config_of(folder / "found", **options), sizes)
            if outcome is None:
                check(folder, Case(options, list(sizes)), monkeypatch)
            else:
                with pytest.raises(PlanError, match=outcome):
                    prepare(config_of(folder / "ours", **options), sizes)
                assert not (folder / "ours").exists()


def outcome_of_megatron(config: Any, sizes: list[int | None]) -> str | None:
    """What our error says where Megatron fails, or loops; None where it builds."""

    def stop(*args: Any) -> NoReturn:
        raise LoopError

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again: an error that a destructor raises is ignored
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.1, 0.1)
    try:
        megatron_build(config, sizes)
    except LoopError:
        return "Megatron would loop forever"
    except (AssertionError, ValueError):
        return "Megatron would fail|fewer than one sample|cannot keep a partial sample"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    return None


def test_what_megatron_rejects_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Weights of blends whose datasets have no sample: an assertion there."""
    prefixes = [write_pair(tmp_path / "a", [3]), write_pair(tmp_path / "b", [300])]
    config = config_of(tmp_path / "cache", blend=(prefixes, None), split="1")
    with pytest.raises(AssertionError):
        megatron_build(config, [10, 0, 0])
    with pytest.raises(PlanError, match=r"a \(train\): has 3 tokens, fewer than one sample of 16"):
        prepare(config_of(tmp_path / "ours", blend=(prefixes, None), split="1"), [10, 0, 0])
    assert not (tmp_path / "ours").exists()


def test_oversampling_is_refused_with_a_surplus_that_suffices(tmp_path: Path) -> None:
    """The sizes of a blend of many sum to more than was asked for, and the heaviest datasets take the rest."""
    options: dict[str, Any] = {"blend": zipf(tmp_path, 300), "split": "1"}
    with pytest.raises(IndexError, match="oversamples"):
        megatron_build(config_of(tmp_path / "theirs", **options), [20_000, 0, 0])
    with pytest.raises(
        PlanError, match=r"\(train\): the blend takes [\d,]+ samples.*to 0\.\d+ or more"
    ) as refused:
        prepare(config_of(tmp_path / "ours", **options), [20_000, 0, 0])
    assert not (tmp_path / "ours").exists()
    enough = float(str(refused.value).split(" to ")[-1].split()[0])
    assert 0.005 < enough < 0.01
    options["mid_level_dataset_surplus"] = enough
    prepare(config_of(tmp_path / "ours", **options), [20_000, 0, 0])
    megatron_build(config_of(tmp_path / "theirs", **options), [20_000, 0, 0])
    assert contents(tmp_path / "ours").items() <= contents(tmp_path / "theirs").items()
