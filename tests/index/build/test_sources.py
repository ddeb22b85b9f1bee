from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

import pytest

from megablend.config.read_spec import ReadSpec, make_options
from megablend.errors import ConfigError, DataError
from megablend.formats import registry
from megablend.index.build.source_spec import SourceSpec
from megablend.index.build.sources import find_source, list_source
from tests.formats.writers import write_megatron
from tests.index.index_data import build, spec, write
from tests.storages import STORAGE


def test_names_are_relative_and_sorted(tmp_path: Path) -> None:
    for name in ("x/b.arrow", "x/a.arrow", "c.arrow"):
        write(tmp_path / name, 1)
    listing = list_source(spec(tmp_path, "**/*.arrow"), storage=STORAGE)
    assert [file.name for file in listing.files] == ["c.arrow", "x/a.arrow", "x/b.arrow"]
    assert (listing.root, listing.read.format) == (str(tmp_path), "arrow")


@pytest.mark.parametrize(
    "pattern", ["nothing*.arrow", "nothing.arrow", "no/where/*.arrow", "prefix_text_document"]
)
def test_a_pattern_that_matches_nothing_names_source_and_pattern(
    tmp_path: Path, pattern: str
) -> None:
    write(tmp_path / "a.arrow", 1)
    with pytest.raises(
        ConfigError, match=rf"source 'books': .*/{pattern.replace('*', '.')} matches no file"
    ):
        list_source(spec(tmp_path, pattern, name="books"), storage=STORAGE)


def test_the_first_missing_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "books" / "a.arrow", 1)
    for pattern in ("boks/x/*.arrow", "boks/*/x.arrow", "boks/a.arrow"):
        says = rf"{re.escape(pattern)} matches no file: there is no folder {tmp_path}/boks$"
        with pytest.raises(ConfigError, match=says):
            list_source(spec(tmp_path, pattern), storage=STORAGE)


def test_a_slip_in_a_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path / "books.arrow", 1)
    with pytest.raises(ConfigError, match=f"did you mean '{path}'"):
        list_source(spec(tmp_path, "bokos.arrow"), storage=STORAGE)


def test_a_folder_of_many_files_is_answered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "books").mkdir()
    for i in range(100):
        (tmp_path / "books" / f"{i}.arrow").touch()
    searches = []
    list_names = registry.list_names

    def search() -> list[str]:  # for installed packages, which takes 5 ms or more
        searches.append(1)
        return list_names()

    monkeypatch.setattr(registry, "list_names", search)
    with pytest.raises(ConfigError, match="is a folder"):
        list_source(spec(tmp_path, "books"), storage=STORAGE)
    assert len(searches) < 10


def test_a_folder_is_answered_with_its_files(tmp_path: Path) -> None:
    write(tmp_path / "books" / "a.arrow", 1)
    with pytest.raises(
        ConfigError,
        match=rf"source 'source': {tmp_path}/books is a folder: .* `{tmp_path}/books/\*\.arrow`",
    ):
        list_source(spec(tmp_path, "books"), storage=STORAGE)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", 1).rename(tmp_path / "\udcff.arrow")
    with pytest.raises(ConfigError, match=r"udcff.arrow': its name has characters .* rename it"):
        list_source(spec(tmp_path), storage=STORAGE)


def test_mixed_formats_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", 1)
    shutil.copy(path, tmp_path / "b.parquet")
    with pytest.raises(
        ConfigError, match=r"source 'source': mixes formats: arrow \(.*a.arrow\), parquet"
    ):
        list_source(spec(tmp_path, "*"), storage=STORAGE)


def test_an_unknown_kind_of_file_names_the_source(tmp_path: Path) -> None:
    (tmp_path / "notes.doc").write_text("")
    with pytest.raises(ConfigError, match=r"source 'source': .*notes.doc"):
        list_source(spec(tmp_path, "*"), storage=STORAGE)


@pytest.mark.parametrize("pattern", ["x", "x.bin", "x.idx", "x.*", "?", "[x]"])
def test_a_megatron_prefix_stands_for_its_two_files(tmp_path: Path, pattern: str) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x{suffix}").write_bytes(b"1234")
    listing = list_source(spec(tmp_path, pattern), storage=STORAGE)
    (file,) = listing.files
    assert (file.name, file.path, listing.read.format) == (
        "x.bin",
        str(tmp_path / "x.bin"),
        "megatron",
    )
    (tmp_path / "x.idx").write_bytes(b"12345")
    assert list_source(spec(tmp_path, pattern), storage=STORAGE).files[0].etag != file.etag


def test_a_megatron_prefix_may_hold_what_looks_like_a_wildcard(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"x[1]{suffix}").write_bytes(b"1234")
    (file,) = list_source(spec(tmp_path, "x[1]"), storage=STORAGE).files
    assert file.name == "x[1].bin"


def test_a_link_to_nothing_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", 1)
    (tmp_path / "b.arrow").symlink_to("gone.arrow")
    (tmp_path / "c.arrow").symlink_to("gone.arrow")
    with pytest.raises(
        DataError,
        match=r"b.arrow: cannot be read: a broken symbolic link \(to gone.arrow\) \(and 1 more: ",
    ) as e:
        list_source(dataclasses.replace(spec(tmp_path), skip_unreadable=False), storage=STORAGE)
    assert f"and 1 more: {tmp_path}/c.arrow), so source 'source' may be missing files" in str(
        e.value
    )
    assert "set `on_unreadable: skip`" in str(e.value)
    listing = list_source(
        dataclasses.replace(spec(tmp_path), skip_unreadable=True), storage=STORAGE
    )
    assert [file.name for file in listing.files] == ["a.arrow"]
    assert listing.skipped == tuple(
        f"{tmp_path}/{n}.arrow: a broken symbolic link (to gone.arrow)" for n in "bc"
    )


def test_nothing_but_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "b.arrow").symlink_to("gone.arrow")
    with pytest.raises(
        ConfigError,
        match=r"source 'source': none of its files can be read: .*b.arrow: a broken symbolic link",
    ):
        list_source(dataclasses.replace(spec(tmp_path), skip_unreadable=True), storage=STORAGE)


def test_a_pair_of_which_half_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    os.mkfifo(tmp_path / "a.idx")
    with pytest.raises(DataError, match=r"a\.idx: cannot be read: a pipe, .* not a regular file"):
        list_source(spec(tmp_path, "a"), storage=STORAGE)


def test_folders_that_look_like_files_are_not_left_out_silently(tmp_path: Path) -> None:
    """Spark and Dask write a folder of files for each table."""
    write(tmp_path / "a.arrow", 1)
    write(tmp_path / "b.arrow" / "part-0.arrow", 1)
    (tmp_path / "notes").mkdir()
    patterns = f"{tmp_path}/*.arrow", f"{tmp_path}/*.arrow/*.arrow"
    says = f"{patterns[0]} matches the folder {tmp_path}/b.arrow, whose files would be left out: add a pattern for them, "
    says += f"`path: [{patterns[0]}, {patterns[1]}]`, or set `on_unreadable: skip`"
    one = spec(tmp_path, "*.arrow")
    with pytest.raises(ConfigError, match=re.escape(says)):
        find_source(one, storage=STORAGE)
    assert find_source(dataclasses.replace(one, patterns=patterns), storage=STORAGE).paths == (
        f"{tmp_path}/a.arrow",
        f"{tmp_path}/b.arrow/part-0.arrow",
    )
    skipped = find_source(dataclasses.replace(one, skip_unreadable=True), storage=STORAGE)
    assert skipped.paths == (f"{tmp_path}/a.arrow",)
    assert skipped.skipped == (f"{tmp_path}/b.arrow: a folder, whose files no pattern matches",)
    assert len(find_source(spec(tmp_path, "**/*.arrow"), storage=STORAGE).paths) == 2
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(ConfigError, match=re.escape(says)):
        find_source(one, storage=STORAGE)


@pytest.mark.parametrize("pattern", ["**/*.arrow", "*/*.arrow"])
def test_links_to_folders_are_followed_once_and_noted(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "y" / "a.arrow", 1)
    (tmp_path / "z").symlink_to("y")
    (tmp_path / "y" / "up").symlink_to("..")
    found = find_source(spec(tmp_path, pattern), storage=STORAGE)
    assert found.paths == (f"{tmp_path}/y/a.arrow",)
    many = 2 if "**" in pattern else 1
    first = "y/up" if "**" in pattern else "z"
    says = f"source 'source': {many} links lead to folders that are already listed (such as {tmp_path}/{first}); "
    assert found.note == says + "each file counts once"


def test_a_file_counts_once_whatever_links_lead_to_it(tmp_path: Path) -> None:
    write(tmp_path / "z" / "a.arrow", 1)
    (tmp_path / "b.arrow").symlink_to("z/a.arrow")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "c").symlink_to("z")
    (tmp_path / "d.arrow").symlink_to(write(tmp_path.parent / f"{tmp_path.name}-outside.data", 2))
    found = find_source(spec(tmp_path, "**/*.arrow"), storage=STORAGE)
    assert [Path(path).name for path in found.paths] == ["d.arrow", "a.arrow"]
    assert found.note == (
        f"source 'source': 1 paths lead to files that are already listed under another name "
        f"(such as {tmp_path}/b.arrow, the same file as "
        f"{tmp_path}/z/a.arrow), and 2 links lead to folders that are already listed (such as {tmp_path}/c); "
        "each file counts once"
    )
    both = dataclasses.replace(
        spec(tmp_path), patterns=(f"{tmp_path}/z/a.arrow", f"{tmp_path}/z/*.arrow")
    )
    assert find_source(both, storage=STORAGE).note is None, "the same name twice is no other name"


def write_pairs(folder: Path, names: str) -> None:
    for name in names:
        for suffix in (".bin", ".idx"):
            (folder / f"{name}{suffix}").write_bytes(name.encode())


@pytest.mark.parametrize("pattern", ["*.bin", "*.idx", "*"])
def test_a_pair_is_skipped_where_its_other_half_leads_nowhere(tmp_path: Path, pattern: str) -> None:
    write_pairs(tmp_path, "ab")
    (tmp_path / "a.idx").unlink()
    (tmp_path / "a.idx").symlink_to("gone")
    listing = list_source(
        dataclasses.replace(spec(tmp_path, pattern), skip_unreadable=True), storage=STORAGE
    )
    assert [file.name for file in listing.files] == ["b.bin"]
    assert any(
        f"{tmp_path}/a." in path and "a broken symbolic link" in path for path in listing.skipped
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user")
def test_a_pair_is_skipped_where_its_idx_is_closed(tmp_path: Path) -> None:
    write_pairs(tmp_path, "ab")
    (tmp_path / "a.idx").chmod(0o600)
    for parent in (tmp_path, *tmp_path.parents[:-2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            found = find_source(
                dataclasses.replace(spec(tmp_path, "*.bin"), skip_unreadable=True), storage=STORAGE
            )
            expected = (f"{tmp_path}/a.bin: {tmp_path}/a.idx: Permission denied",)
            os._exit((found.paths, found.skipped) != ((f"{tmp_path}/b.bin",), expected))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_several_idx_over_one_bin_are_files_of_their_own(tmp_path: Path) -> None:
    write_pairs(tmp_path, "a")
    (tmp_path / "b.bin").symlink_to("a.bin")
    (tmp_path / "b.idx").write_bytes(b"other documents")
    (tmp_path / "c.bin").symlink_to("a.bin")
    (tmp_path / "c.idx").symlink_to("a.idx")
    found = find_source(spec(tmp_path, "*.bin"), storage=STORAGE)
    assert [Path(path).name for path in found.paths] == ["a.bin", "b.bin"]
    assert found.note is not None
    assert "1 paths" in found.note


def test_a_cache_among_the_data_is_no_data(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", [[1, 2], [3]])
    for _ in range(2):
        assert build(tmp_path / "cache", spec(tmp_path, "**/*.bin")).num_files == 1


def test_a_folder_of_splits_is_answered_with_all_files_which_are_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "my[1]"  # a remedy's path is a pattern
    for seed, name in enumerate(["train/0.arrow", "test/0.arrow", "a.json", "b.json", "c.json"]):
        write(folder / name, seed)
    says = rf"is a folder: specify its files as `{re.escape(f'{tmp_path}/my[[]1]/**/*.arrow')}`$"
    with pytest.raises(ConfigError, match=says):
        list_source(spec(tmp_path, "my[1]"), storage=STORAGE)
    listing = list_source(spec(tmp_path, "my[[]1]/**/*.arrow"), storage=STORAGE)
    assert len(listing.files) == 2
    assert "match files of several splits (test (" in (listing.note or "")


def test_what_hugging_face_keeps_next_to_data_is_warned_of(tmp_path: Path) -> None:
    cached = ["cache-149d20b4530ae6d3", "cache-5b577d3f989b5078_00000_of_00002"]
    for seed, name in enumerate(["data-00000-of-00001", *cached]):
        write(tmp_path / f"d/{name}.arrow", seed)
    note = list_source(spec(tmp_path, "d/*.arrow"), storage=STORAGE).note
    assert re.match(
        rf"source 'source': .* match 2 cache files .* \(such as \S*/{cached[0]}.arrow\)", note or ""
    )
    with pytest.raises(ConfigError, match=r"specify its files as `\S*/d/data-\*\.arrow`"):
        list_source(spec(tmp_path, "d"), storage=STORAGE)
    (tmp_path / "d/data-00000-of-00001.arrow").rename(tmp_path / "d/json-train.arrow")
    with pytest.raises(ConfigError, match=r"specify its files as `\S*/d/json-train\.arrow`"):
        list_source(spec(tmp_path, "d"), storage=STORAGE)
    for pattern in ("d/json-*.arrow", "d/cache-149*.arrow"):
        assert list_source(spec(tmp_path, pattern), storage=STORAGE).note is None


@pytest.mark.parametrize(
    ("log", "table"),
    [
        ("t/_delta_log/00000000000000000000.json", "a Delta"),
        ("t/metadata/v1.metadata.json", "an Iceberg"),
        ("t/.hoodie/hoodie.properties", "a Hudi"),
        ("t/snapshot/LATEST", "a Paimon"),
    ],
)
def test_folders_of_tables_are_warned_of(tmp_path: Path, log: str, table: str) -> None:
    file = tmp_path / "t/data/part-00000-dbadd770-48be-4e69-9197-642d62ace002-c000.arrow"
    write(file, 1)
    assert list_source(spec(tmp_path, "t/**/*.arrow"), storage=STORAGE).note is None
    (tmp_path / log).parent.mkdir()
    (tmp_path / log).write_text("{}")
    for pattern in ("t/**/*.arrow", "t/data/*.arrow"):
        note = list_source(spec(tmp_path, pattern), storage=STORAGE).note
        assert (note or "").startswith(f"source 'source': {tmp_path}/t is {table} table, ")
    for folder in ("t", "t/data"):
        with pytest.raises(
            ConfigError, match=rf"/t is {table} table, .*; list only the table's current"
        ):
            list_source(spec(tmp_path, folder), storage=STORAGE)
    # As the list that a table's library gives
    assert list_source(spec(tmp_path, f"t/data/{file.name}"), storage=STORAGE).note is None


def test_raw_files_of_different_endings_are_warned_of(tmp_path: Path) -> None:
    """As those that datatrove writes next to its tokens."""
    names = ["x.ds", "x.ds.index", "x.ds.metadata", "a.0001", "a.0002", "b/y.bin", "b/z.npy"]
    for seed, name in enumerate(names):
        write(tmp_path / name, seed)

    def note(*patterns: str) -> str | None:
        read = ReadSpec(format="raw", options=make_options({"dtype": "uint16"}))
        paths = tuple(str(tmp_path / pattern) for pattern in patterns)
        return list_source(SourceSpec(name="source", patterns=paths, read=read), STORAGE).note

    for pattern in ("x*", "x.ds*"):
        assert (note(pattern) or "").startswith(
            "source 'source': its patterns match files with different endings (such as "
            f"{tmp_path}/x.ds and {tmp_path}/x.ds.index), and all of them are read as tokens; "
        )
    for patterns in (("x.ds",), ("a.*",), ("b/*.bin", "b/*.npy")):
        assert note(*patterns) is None


def test_each_table_below_the_common_folder_is_named(tmp_path: Path) -> None:
    name = "part-00000-dbadd770-48be-4e69-9197-642d62ace002-c000.arrow"
    for seed, folder in enumerate(("a/day=1", "b", "c/data", "plain")):
        write(tmp_path / folder / name, seed)
    for log in (
        "a/_delta_log/0.json",
        "b/.hoodie/hoodie.properties",
        "c/metadata/v1.metadata.json",
    ):
        (tmp_path / log).parent.mkdir()
        (tmp_path / log).write_text("{}")
    note = list_source(spec(tmp_path, "**/*.arrow"), storage=STORAGE).note
    assert (note or "").startswith(
        f"source 'source': {tmp_path}/a is a Delta table and {tmp_path}/b is a Hudi table and {tmp_path}/c is an Iceberg "
    )


@pytest.mark.parametrize(
    "folder",
    ["data", "t/date=2024-01-02/hour=7", "data/date=2024-01-02", "t/date=2024-01-02/bucket-3"],
)
def test_tables_are_told_by_the_folders_above_of_partitions(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "part-00000-dbadd770-48be-4e69-9197-642d62ace002-c000.arrow"
    write(file, 1)
    table = folder.partition("/")[0]
    (tmp_path / table / "_delta_log").mkdir()
    (tmp_path / table / "_delta_log/00000000000000000000.json").write_text("{}")
    note = list_source(spec(tmp_path, f"{folder}/*.arrow"), storage=STORAGE).note
    assert (note or "").startswith(f"source 'source': {tmp_path}/{table} is a Delta table, ")


@pytest.mark.parametrize(
    ("names", "pattern", "splits"),
    [
        (["d/train/a", "d/validation/a"], "d/**/*.arrow", ("train", "validation")),
        (["d/x/train/a", "d/y/test/a"], "d/*/*/*.arrow", ("train", "test")),
        (["train-00000-of-00001", "test-00000-of-00001"], "*.arrow", ("test", "train")),
        (["train", "val"], "*.arrow", ("train", "val")),
        (["x_train_01", "x_valid_01"], "*.arrow", ("train", "valid")),
        (["Train/a", "Test/a"], "*/*.arrow", ("test", "train")),
        (["train_sft/a", "test_sft/a"], "*/*.arrow", ("test", "train")),
        (["trains", "latest", "devices", "evaluation"], "*.arrow", None),
        (["train/test_a", "train/eval_b"], "train*/*.arrow", None),
        (["d/train/a", "e/train/a"], "*/train/*.arrow", None),
        (["train/a", "books/a"], "*/*.arrow", None),
        (["test/d/a", "test/d/b"], "test/d/*.arrow", None),
    ],
)
def test_patterns_over_several_splits_are_warned_of(
    tmp_path: Path, names: list[str], pattern: str, splits: tuple[str, str] | None
) -> None:
    for seed, name in enumerate(names):
        write(tmp_path / f"{name}.arrow", seed)
    note = list_source(spec(tmp_path, pattern), storage=STORAGE).note
    if splits is None:
        assert note is None
    else:
        assert re.match(
            rf"source 'source': .* of several splits \({splits[0]} \(.*, {splits[1]} \(", note or ""
        )
