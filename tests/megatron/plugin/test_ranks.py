"""The plugin on several ranks: from an empty cache each artefact is built once; where one rank fails, all do."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.forked_ranks import serve_ranks
from tests.megatron.plugin_data import draw_documents, environment, launcher, write_word

NUM_RANKS = 4
SIZES = [300, 40, 20]
NUM_ARTEFACTS = 3 * 3 + 3
"""Three datasets and a blend in each split."""
Result = dict[str, Any]


def spec_of(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    words = [
        write_word(folder / "data" / str(seed), kind, draw_documents(seed, 80)) for seed in range(3)
    ]
    cls = "GPTDataset" if kind == "megatron" else "MegablendGPTDataset"
    (folder / "out").mkdir(exist_ok=True)
    return {
        "class": cls,
        "blend": [words, [0.2, 0.3, 0.5]],
        "split": "70,20,10",
        "sizes": SIZES,
        "cache": str(folder / "cache"),
        "out": str(folder / "out"),
        "launcher": "torchrun",
        **options,
    }


def write_spec(folder: Path, spec: dict[str, Any]) -> str:
    for path in Path(spec["out"]).glob("*.json"):
        path.unlink()
    (folder / "spec.json").write_text(json.dumps(spec))
    return str(folder / "spec.json")


def results(spec: dict[str, Any]) -> dict[int, Result]:
    return {
        int(path.stem): json.loads(path.read_text()) for path in Path(spec["out"]).glob("*.json")
    }


def run(
    folder: Path, spec: dict[str, Any], num_ranks: int, before: Callable[[], None] | None = None
) -> list[Result]:
    """All ranks' results, in their order."""
    made = subprocess.run(
        [*launcher(spec["launcher"], num_ranks), write_spec(folder, spec)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        preexec_fn=before,
    )
    found = results(spec)
    assert sorted(found) == list(range(num_ranks)), made.stderr
    return [found[rank] for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def forked() -> Iterator[Callable[[str, int], list[int]]]:
    with serve_ranks("tests.megatron.plugin_driver", "megatron") as run_ranks:
        yield run_ranks


def run_forked(
    forked: Callable[[str, int], list[int]], folder: Path, spec: dict[str, Any], num_ranks: int
) -> list[Result]:
    """All ranks' results, in their order."""
    codes = forked(write_spec(folder, spec), num_ranks)
    found = results(spec)
    assert sorted(found) == list(range(num_ranks)), codes
    return [found[rank] for rank in range(num_ranks)]


def built_once(found: list[Result]) -> None:
    assert [each["error"] for each in found] == [None] * len(found)
    counts = Counter(base for each in found for base in each["built"])
    assert len(counts) == NUM_ARTEFACTS
    assert set(counts.values()) == {1}


def test_what_goes_megatrons_way_waits_for_rank_0(
    tmp_path: Path, forked: Callable[[str, int], list[int]]
) -> None:
    """From an empty cache the other ranks find nothing before."""
    spec = spec_of(tmp_path, "megatron")
    first, second = run_forked(forked, tmp_path, {**spec, "class": "OtherDataset"}, 2)
    assert [first["error"], second["error"], first["built"], second["built"]] == [
        None,
        None,
        [],
        [],
    ]
    assert first["samples"] == second["samples"]


def test_ranks_with_different_settings_all_name_them(
    tmp_path: Path, forked: Callable[[str, int], list[int]]
) -> None:
    """Whether something is to be built, or each rank finds its own cache whole."""
    spec = spec_of(tmp_path, "megatron", cache=str(tmp_path / "cache{rank}"))
    says = "ConfigError: the ranks have different settings: random_seed is 1234 on rank 0, 7 on rank 1; start all ranks"
    for is_whole in (False, True):
        if is_whole:
            for seed in (1234, 7):
                made = run_forked(forked, tmp_path, {**spec, "seeds": {"0": seed, "1": seed}}, 2)
                assert [each["error"] for each in made] == [None, None]
        for each in run_forked(forked, tmp_path, {**spec, "seeds": {"1": 7}}, 2):
            assert each["error"].startswith(says)


slow = pytest.mark.slow  # each rank takes seconds to import what it needs


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("torchrun", "megatron"),
        pytest.param("torchrun", "parquet", marks=slow),
        pytest.param("mpirun", "megatron", marks=slow),
        pytest.param("mpirun", "parquet", marks=slow),
    ],
)
def test_each_artefact_is_built_once(
    tmp_path: Path, name: str, kind: str, forked: Callable[[str, int], list[int]]
) -> None:
    spec = spec_of(tmp_path, kind, launcher=name)
    found = run(tmp_path, spec, 2)
    built_once(found)
    assert sum(bool(each["built"]) for each in found) > 1
    assert all(each["samples"] == found[0]["samples"] for each in found)
    again = run_forked(forked, tmp_path, spec | {"launcher": "torchrun"}, NUM_RANKS)
    assert [each["built"] for each in again] == [[]] * NUM_RANKS
    assert again[0]["samples"] == found[0]["samples"]


@slow
def test_one_rank_and_four_build_the_same(tmp_path: Path) -> None:
    specs = [
        spec_of(tmp_path, "megatron", cache=str(tmp_path / f"cache{n}")) for n in (1, NUM_RANKS)
    ]
    found = [run(tmp_path, spec, n)[0] for spec, n in zip(specs, (1, NUM_RANKS), strict=True)]
    assert found[0]["samples"] == found[1]["samples"]
    caches = [
        {p.name: p.read_bytes() for p in Path(spec["cache"]).glob("*.*") if p.is_file()}
        for spec in specs
    ]
    assert caches[0] == caches[1]


def test_rank_0_need_not_hold_a_dataset(
    tmp_path: Path, forked: Callable[[str, int], list[int]]
) -> None:
    spec = spec_of(tmp_path, "megatron", holders=[1, 3])
    found = run_forked(forked, tmp_path, spec, NUM_RANKS)
    built_once(found)
    assert found[0]["samples"] == found[2]["samples"] == [None] * 3
    assert found[1]["samples"] == found[3]["samples"] != [None] * 3
    assert not found[0]["built"]


@pytest.mark.parametrize(
    "name", ["forked", *(pytest.param(name, marks=slow) for name in ("torchrun", "mpirun"))]
)
def test_folders_of_their_own_are_each_built(
    tmp_path: Path, name: str, forked: Callable[[str, int], list[int]]
) -> None:
    spec = spec_of(tmp_path, "arrow", cache=str(tmp_path / "cache{rank}"))
    found = (
        run_forked(forked, tmp_path, spec, 2)
        if name == "forked"
        else run(tmp_path, spec | {"launcher": name}, 2)
    )
    for each in found:
        built_once([each])
    assert found[0]["samples"] == found[1]["samples"]
    own = [
        {p.name: p.read_bytes() for p in (tmp_path / f"cache{rank}").glob("*.*") if p.is_file()}
        for rank in (0, 1)
    ]
    assert own[0] == own[1]


@slow
def test_a_rank_that_lacks_the_cache_is_not_left_alone(tmp_path: Path) -> None:
    run(tmp_path, spec_of(tmp_path, "megatron", cache=str(tmp_path / "cache0")), 1)
    found = run(tmp_path, spec_of(tmp_path, "megatron", cache=str(tmp_path / "cache{rank}")), 2)
    assert [each["error"] for each in found] == [None, None]
    assert [len(each["built"]) for each in found] == [0, NUM_ARTEFACTS]


@pytest.mark.parametrize("name", [pytest.param("torchrun", marks=slow), "mpirun"])
def test_a_cache_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    found = run(tmp_path, spec_of(tmp_path, "megatron", launcher=name), 2)
    for each in found:
        assert "CacheError" in each["error"]
        assert "cannot write the cache" in each["error"]


def test_one_rank_without_a_cache_fails_them_all(
    tmp_path: Path, forked: Callable[[str, int], list[int]]
) -> None:
    (tmp_path / "cache1").write_text("a file where the folder should be")
    found = run_forked(
        forked, tmp_path, spec_of(tmp_path, "megatron", cache=str(tmp_path / "cache{rank}")), 3
    )
    for each in found:
        assert "cache1: cannot write the cache" in each["error"]


@slow
@pytest.mark.parametrize("kind", ["megatron", "parquet"])
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    for limit in (700, 2500):
        spec = spec_of(tmp_path, kind, cache=str(tmp_path / f"cache{limit}"))

        def lower(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

        found = run(tmp_path, spec, 2, before=lower)
        for each in found:
            assert "cannot write the cache (File too large)" in each["error"]
        assert [each["error"] for each in run(tmp_path, spec, 2)] == [None, None]


def test_a_rank_is_killed(tmp_path: Path, forked: Callable[[str, int], list[int]]) -> None:
    spec = spec_of(tmp_path, "megatron", victim=2)
    assert forked(write_spec(tmp_path, spec), NUM_RANKS)[2] == -signal.SIGKILL
    found = results(spec)
    assert sorted(found) == [0, 1, 3]
    for each in found.values():
        assert "a rank exited during dataset setup" in each["error"]
    again = run_forked(forked, tmp_path, spec | {"victim": None}, NUM_RANKS)
    assert [each["error"] for each in again] == [None] * NUM_RANKS
    assert again[0]["samples"] is not None
