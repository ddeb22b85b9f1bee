"""What is found in many files lies in packs: whole or not trusted, and the index is the same as from single fragments."""

from pathlib import Path

import pytest

from megablend.errors import REMOVE_REMEDY, CorruptFileError
from megablend.index.build import packs as module
from megablend.index.build.packs import Pack
from megablend.index.tables.cache_folders import fragments, packs, snapshots
from megablend.index.verify.gc import collect
from megablend.index.verify.verify import verify
from megablend.storage.local import LocalStorage
from tests.index.index_data import build, driver, run, snapshot_bytes, spec, write
from tests.storages import STORAGE

NUM_FILES = 40
"""More than PACK_MIN_FILES."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed in range(NUM_FILES):
        write(folder / f"{seed:02}.arrow", seed)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of builds that no busy machine makes so slow that they write what they have found before they end."""
    monkeypatch.setattr(module, "PACK_SECONDS", float("inf"))
    return tmp_path / "cache"


def listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def as_singles(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Build as megablend 0.1.0 did: a fragment a file."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "PACK_MIN_FILES", NUM_FILES + 1)
        return build(cache, spec(data)).digest


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def read_only_the_magic(storage: LocalStorage, path: str, offset: int, size: int) -> bytes:
    """What tells an Arrow file from a stream: the first bytes of a source's first file."""
    assert offset == 0
    assert size <= 6
    return Path(path).read_bytes()[:size]


def test_many_files_make_one_pack_and_a_build_of_the_same_reads_no_data(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(cache, spec(data))
    assert (first.read, first.reused, first.added) == (NUM_FILES, 0, NUM_FILES)
    assert listed(fragments(cache)) == []
    (pack,) = listed(packs(cache))
    assert sorted(Pack(pack).contents()) == sorted(set(Pack(pack).contents()))
    monkeypatch.setattr(LocalStorage, "read", read_only_the_magic)
    again = build(cache, spec(data))
    assert (again.digest, again.read, again.reused, again.created) == (
        first.digest,
        0,
        NUM_FILES,
        False,
    )
    assert listed(packs(cache)) == [pack]
    renamed = build(cache, spec(data, name="other"))
    assert (renamed.read, renamed.reused) == (0, NUM_FILES)


def test_packs_and_single_fragments_make_the_same_index(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = as_singles(data, cache, monkeypatch)
    assert len(listed(fragments(cache))) == NUM_FILES
    monkeypatch.setattr(module, "PACK_FILES", 35)  # the last five stay single
    other = cache.with_name("other")
    assert build(other, spec(data)).digest == digest
    assert (len(listed(packs(other))), len(listed(fragments(other)))) == (1, 5)
    assert snapshot_bytes(other, digest) == snapshot_bytes(cache, digest)
    monkeypatch.setattr(module, "PACK_SECONDS", -1.0)  # each at once
    assert build(cache.with_name("third"), spec(data)).digest == digest
    assert len(listed(fragments(cache.with_name("third")))) == NUM_FILES


def test_single_fragments_of_an_older_release_go_into_a_pack(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = as_singles(data, cache, monkeypatch)
    monkeypatch.setattr(LocalStorage, "read", read_only_the_magic)
    report = build(cache, spec(data))
    assert (report.digest, report.read, report.reused) == (digest, 0, NUM_FILES)
    (pack,) = listed(packs(cache))
    assert len(listed(fragments(cache))) == NUM_FILES
    assert collect(cache, lambda: [], min_age_seconds=-9, dry_run=False).others == NUM_FILES
    assert (listed(fragments(cache)), listed(packs(cache))) == ([], [pack])
    assert build(cache, spec(data)).digest == digest


@pytest.mark.parametrize(
    "place", [0, 20, 600, -900, -1], ids=["magic", "length", "entries", "blocks", "digest"]
)
def test_a_damaged_pack_is_never_trusted(data: Path, cache: Path, place: int) -> None:
    digest = build(cache, spec(data)).digest
    (pack,) = listed(packs(cache))
    content = pack.read_bytes()
    flip(pack, place)
    (problem,) = verify(str(cache), data=False, storage=STORAGE)
    assert (
        problem
        == f"{pack}: damaged pack of {len(content)} bytes (its checksum is wrong); {REMOVE_REMEDY}"
    )
    report = build(cache, spec(data))
    assert (report.digest, report.read, report.notes) == (digest, NUM_FILES, (problem,))
    assert [path.read_bytes() for path in listed(packs(cache))] == [content]
    assert verify(str(cache), data=False, storage=STORAGE) == []


@pytest.mark.parametrize("length", [0, 10, 40, 3000])
def test_a_pack_that_is_cut_off_is_never_trusted(data: Path, cache: Path, length: int) -> None:
    digest = build(cache, spec(data)).digest
    (pack,) = listed(packs(cache))
    pack.write_bytes(pack.read_bytes()[:length])
    report = build(cache, spec(data))
    assert (report.digest, report.read, len(report.notes)) == (digest, NUM_FILES, 1)
    assert report.notes[0].startswith(str(pack))


def test_what_cannot_be_read_is_told_and_stays(data: Path, cache: Path) -> None:
    digest = build(cache, spec(data)).digest
    (packs(cache) / "folder").mkdir()
    report = build(cache, spec(data))
    assert (report.digest, report.read) == (digest, 0)
    assert report.notes[0].startswith(f"{packs(cache) / 'folder'}: cannot be read (")
    assert (packs(cache) / "folder").is_dir()


def test_a_bad_file_leaves_what_was_found_in_others(
    data: Path, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    for path in listed(data):
        (folder / path.name).write_bytes(path.read_bytes())
    # Which comes last: large ones come first
    bad = min(listed(folder), key=lambda path: path.stat().st_size)
    content = bad.read_bytes()
    bad.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFileError, match=bad.name):
        build(cache, spec(folder))
    assert len(listed(packs(cache))) == 1
    bad.write_bytes(content)
    report = build(cache, spec(folder))
    assert (report.read, report.changed) == (1, ())
    assert report.digest == build(cache.with_name("other"), spec(data)).digest


def test_a_pack_goes_when_no_index_holds_any_of_its_files(data: Path, cache: Path) -> None:
    build(cache, spec(data))
    (pack,) = listed(packs(cache))
    build(cache, spec(data, "38.arrow"))
    found = collect(cache, lambda: [], min_age_seconds=-9, dry_run=False)
    assert (len(found.snapshots), found.others, pack.exists()) == (1, 0, True)
    assert build(cache, spec(data, "38.arrow")).read == 0
    write(cache.parent / "new.arrow", 99)
    build(cache, spec(cache.parent, "new.arrow"))
    assert collect(cache, lambda: [], min_age_seconds=9, dry_run=False).others == 0
    assert collect(cache, lambda: [], min_age_seconds=-9, dry_run=True).others == 1
    assert pack.exists()
    assert collect(cache, lambda: [], min_age_seconds=-9, dry_run=False).others == 1
    assert not pack.exists()
    assert len(listed(snapshots(cache))) == 1


@pytest.mark.long
def test_ranks_write_packs_of_their_own_and_the_same_index(data: Path, cache: Path) -> None:
    for seed in range(NUM_FILES, 2 * NUM_FILES):
        write(cache.parent / "more" / f"{seed}.arrow", seed)
    sources = (f"a={data}/*.arrow", f"b={cache.parent}/more/*.arrow")
    made = []
    for num_ranks in (0, 2):
        folder = cache / str(num_ranks)
        result = run(driver(num_ranks, folder, *sources))
        assert result.returncode == 0, result.stderr
        assert len(listed(packs(folder))) == max(1, num_ranks)
        (snapshot,) = listed(snapshots(folder))
        made.append(snapshot_bytes(folder, snapshot.name))
    assert made[0] == made[1]
