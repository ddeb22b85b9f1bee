"""The corpus script on this machine's own text, and on folders made for the purpose."""

import gzip
import json
import warnings
from pathlib import Path

import make_corpus
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus.texts import Candidate, candidates, docstrings, roots, source_of, texts
from tokenizers import Tokenizer

NUM_TOKENS = 200_000
FEW_ROOTS = [*roots()[:1], Path(np.__file__).parent]
"""Folders that have text of each source; to search all takes a second or two."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("corpus") / "data"
    assert make_corpus.main([str(out), "--tokens", str(NUM_TOKENS), "--vocab", "2000"]) == 0
    return out


def rows(corpus: Path, name: str) -> list[tuple[list[int], str]]:
    if name == "docs":
        tables = [
            pa.ipc.open_file(str(file)).read_all()
            for file in sorted((corpus / name).glob("*.arrow"))
        ]
    else:
        tables = [pq.read_table(file) for file in sorted((corpus / name).glob("*.parquet"))]
    table = pa.concat_tables(tables)
    return list(zip(table["input_ids"].to_pylist(), table["path"].to_pylist(), strict=True))


def test_gives_the_tokens_asked_for_in_four_sources(corpus: Path) -> None:
    sources = json.loads((corpus / "corpus.json").read_text())["sources"]
    assert {source["name"] for source in sources} == {"stdlib", "packages", "docs", "licences"}
    assert min(source["tokens"] for source in sources) > 0
    longest = max(
        len(tokens) for name in ("stdlib", "packages", "docs") for tokens, _ in rows(corpus, name)
    )
    assert NUM_TOKENS <= sum(source["tokens"] for source in sources) <= NUM_TOKENS + 4 * longest


@pytest.mark.parametrize("name", ["stdlib", "packages", "docs"])
def test_tokens_decode_to_the_text_they_came_from(corpus: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    for tokens, path in rows(corpus, name)[:10]:
        content = Path(path).read_bytes()
        text = (gzip.decompress(content) if path.endswith(".gz") else content).decode()
        decoded = tokenizer.decode(tokens, skip_special_tokens=False)
        assert decoded in (text, docstrings(text))


def test_one_parquet_source_has_page_index_and_checksums_the_other_pyarrows_defaults(
    corpus: Path,
) -> None:
    def column(name: str) -> pq.ColumnChunkMetaData:
        return pq.read_metadata(next((corpus / name).glob("*.parquet"))).row_group(0).column(0)

    assert column("stdlib").has_offset_index
    assert column("stdlib").has_column_index
    assert (column("stdlib").compression, column("stdlib").has_dictionary_page) == ("ZSTD", False)
    assert not column("packages").has_offset_index
    assert (column("packages").compression, column("packages").has_dictionary_page) == (
        "SNAPPY",
        True,
    )
    pq.read_table(corpus / "stdlib", page_checksum_verification=True)


def test_bin_and_idx_are_as_megatron_reads_them(corpus: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(corpus / "licences_text_document"))
    licences = next(
        source
        for source in json.loads((corpus / "corpus.json").read_text())["sources"]
        if source["name"] == "licences"
    )
    documents = [np.asarray(dataset[i]) for i in range(len(dataset))]
    assert len(documents) == licences["documents"]
    assert sum(map(len, documents)) == licences["tokens"] + licences["documents"]
    assert all(document[-1] == 0 and (document[:-1] != 0).all() for document in documents)
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))


def test_the_same_arguments_make_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_corpus, "roots", lambda: FEW_ROOTS)
    for name in ("a", "b"):
        make_corpus.main([str(tmp_path / name), "--tokens", "20000", "--vocab", "400"])
    files = sorted(
        path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()
    )
    assert len(files) == 7
    assert all(
        (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        for file in files
    )


def test_a_folder_that_is_there_is_left_alone(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_corpus.main([str(corpus)])
    assert "exists already: remove it, or name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--vocab", "256"], "--vocab 256 is not from 257"), (["--tokens", "0"], "--tokens 0 is not")],
)
def test_impossible_sizes_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_corpus.main(["nowhere", *arguments])
    assert message in capsys.readouterr().err


def test_takes_all_there_is_where_there_is_less_than_asked(tmp_path: Path) -> None:
    for i, name in enumerate(["LICENSE", "README.md", "module.py"]):
        (tmp_path / name).write_text(f"text number {i} <|endoftext|> and so on\n" * (i + 3))
    written = make_corpus.make_corpus(
        tmp_path / "out", num_tokens=10**6, vocab_size=300, seed=0, folders=[tmp_path]
    )
    assert {source.name: source.documents for source in written} == {
        "licences": 1,
        "docs": 1,
        "stdlib": 0,
        "packages": 1,
    }
    assert {source.name: source.files for source in written}["stdlib"] == 0
    [(tokens, _)] = rows(tmp_path / "out", "packages")
    assert 0 not in tokens, "the name of the end-of-document token within a text is plain text"


def test_equal_unreadable_and_odd_files_are_left_out(tmp_path: Path) -> None:
    good = "some text, long enough to be taken as a document of its own, it is\n"
    contents = {
        "a": good.encode(),
        "b": good.encode(),
        "c": b"\xff" * 100,
        "d": good.encode() + b"\0",
        "e": b"short",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = [Candidate(str(tmp_path / name), docstrings=False) for name in [*contents, "absent"]]
    assert [Path(text.path).name for text in texts(files, set())] == ["a"]


def test_order_depends_on_names_and_seed(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b" / "moved"):
        folder.mkdir(parents=True)
        for i in range(20):
            (folder / f"{i}.md").touch()

    def order(folder: Path, seed: int) -> list[str]:
        return [Path(file.path).name for file in candidates([folder], seed)["docs"]]

    assert (
        order(tmp_path / "a", 0) == order(tmp_path / "b" / "moved", 0) != order(tmp_path / "a", 1)
    )
    assert sorted(order(tmp_path / "a", 0)) == sorted(order(tmp_path / "a", 1))


@pytest.mark.parametrize(
    ("path", "in_stdlib", "source"),
    [
        ("lib/json/decoder.py", True, "stdlib"),
        ("site-packages/torch/nn/init.pyi", False, "packages"),
        ("site-packages/licenses.py", False, "packages"),
        ("site-packages/numpy-2.dist-info/licenses/LICENSE.txt", False, "licences"),
        ("/usr/share/common-licenses/GPL-3", False, "licences"),
        ("/usr/share/doc/bash/copyright", False, "licences"),
        ("/usr/share/doc/bash/changelog.gz", False, "docs"),
        ("/usr/share/man/man1/ls.1.gz", False, "docs"),
        ("site-packages/x.dist-info/METADATA", False, "docs"),
        ("site-packages/torch/lib/libtorch.so", False, None),
    ],
)
def test_a_files_source_is_told_by_its_name(path: str, in_stdlib: bool, source: str | None) -> None:
    assert source_of(Path(path), in_stdlib=in_stdlib) == source


def test_docstrings_are_found_and_unindented() -> None:
    code = '"""Module."""\n\ndef f():\n    """First.\n\n    Second.\n    """\n    return """no"""\n'
    assert docstrings(code) == "Module.\n\nFirst.\n\nSecond."
