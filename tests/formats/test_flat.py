"""Flat token columns: what their documents are, compared with documents cut by hand."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import megablend
from megablend.errors import ConfigError
from tests.runs import make_config, read_samples

EOD = 7
KINDS = ("parquet", "parquet-index", "arrow", "arrow-stream")
CHOICES: dict[str, Any] = {"file": "file", "row_group": "row_group", "eod": {"eod_token": EOD}}


def make_tokens(seed: int, size: int) -> list[int | None]:
    """Tokens, some null, with separators at the edges of pages of 10 and row groups of 70, and some together."""
    tokens: list[int | None] = np.random.default_rng(seed).integers(8, 5000, size).tolist()
    for place in (9, 10, 11, 69, 70, 139, 155, 156, size - 1 if seed % 2 else 3):
        tokens[place] = EOD
    tokens[40] = tokens[71] = None
    tokens[100:112] = [None] * 12  # a page without tokens
    return tokens


def write(folder: Path, kind: str) -> tuple[str, list[list[int | None]]]:
    """Two files of row groups of 70; their pattern, and their tokens."""
    folder.mkdir()
    files = [make_tokens(1, 210), make_tokens(2, 197)]
    for number, tokens in enumerate(files):
        table = pa.table({"tokens": pa.array(tokens, pa.int32())})
        path = f"{folder}/{number}.{kind.partition('-')[0]}"
        if kind.startswith("parquet"):
            is_indexed = kind == "parquet-index"
            pq.write_table(
                table,
                path,
                row_group_size=70,
                write_batch_size=10,
                data_page_size=1,
                use_dictionary=False,
                write_page_index=is_indexed,
            )
        else:
            new = pa.ipc.new_stream if kind == "arrow-stream" else pa.ipc.new_file
            with new(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=70)
    return f"{folder}/*", files


def cut(files: list[list[int | None]], choice: str) -> list[list[int]]:
    """The documents, by hand."""
    found = list[list[int]]()
    for rows in files:
        groups = (
            [rows[i : i + 70] for i in range(0, len(rows), 70)] if choice == "row_group" else [rows]
        )
        for group in groups:
            document = list[int]()
            for token in group:
                if token is not None:
                    document.append(token)
                if choice == "eod" and token == EOD:
                    found.append(document)
                    document = []
            if document:
                found.append(document)
    return found


@pytest.mark.long
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_flat_column(tmp_path: Path, kind: str, choice: str) -> None:
    pattern, files = write(tmp_path / "data", kind)
    expected = cut(files, choice)
    shares = (0.5, 0.25, 0.25)
    bounds = [round(share * len(expected)) for share in (0, 0.5, 0.75, 1)]
    for order in ("sequential", "document", "block"):
        source = {
            "name": "s",
            "path": pattern,
            "documents": CHOICES[choice],
            "append_eod": 5001,
            "column": "tokens",
        }
        settings: dict[str, Any] = {
            "order": order,
            "split": list(shares),
            "sequence_length": 1,
            "lanes": 1,
            "shuffle_window": 1,
        }
        config = make_config(
            tmp_path,
            [source],
            cache=f"{tmp_path}/{order}",
            samples=1,
            add_extra_token_to_sequence=False,
            **settings,
        )
        del config["samples"]
        config["epochs"] = 1
        built = megablend.build(config)
        assert not [each for each in built.warnings if "counts as a document" in each]
        for number, split in enumerate(("train", "valid", "test")):
            documents = expected[bounds[number] : bounds[number + 1]]
            tokens = [[*document, 5001] for document in documents]
            read = (
                [int(each.tokens[0]) for each in read_samples(megablend.open(config, split))]
                if documents
                else []
            )
            flat = [token for document in tokens for token in document]
            assert sorted(read) == sorted(flat)
            if order == "sequential":
                assert read == flat
            if order == "document":
                ends = [i + 1 for i, token in enumerate(read) if token == 5001]
                parts = [read[a:b] for a, b in zip([0, *ends], ends, strict=False)]
                assert sorted(parts) == sorted(tokens)
        assert megablend.verify(config["cache"], data=True).problems == ()
        ledger = megablend.build(config).ledger
        assert ledger.digest == built.ledger.digest


def make_flat(folder: Path, kind: str, **settings: Any) -> dict[str, Any]:
    pattern, _ = write(folder / "data", kind)
    return make_config(
        folder, [{"name": "s", "path": pattern, "column": "tokens"} | settings], samples=20
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_build_asks_what_a_document_is(tmp_path: Path, kind: str) -> None:
    config = make_flat(tmp_path, kind)
    for more in ({"split": "50,25,25"}, {"order": "document"}, {"inter_document_masking": True}):
        with pytest.raises(
            ConfigError,
            match=r"source 's' has one token per row, so each token would be a document",
        ):
            megablend.build(config | more)
    splits = "2: 1, 1, 0 in the splits.*6: 3, 1, 2 in the splits"
    says = rf"`documents: file` \({splits}\) or `documents: {{eod_token: ID}}` for"
    with pytest.raises(ConfigError, match=says):
        megablend.build(config | {"split": "50,25,25"})
    with pytest.raises(
        ConfigError, match=r"`documents: file` \(2\), `documents: row_group` \(6\) or"
    ):
        megablend.build(config | {"sources": [config["sources"][0] | {"append_eod": 1}]})
    # What it would be is on the index of the build before
    with pytest.raises(ConfigError, match=says):
        megablend.describe(config | {"split": "50,25,25"})
    assert megablend.build(config).warnings == ()  # nothing goes by documents


@pytest.mark.long
@pytest.mark.parametrize("at_end", [True, False])
def test_a_stage_asks_what_a_document_is(tmp_path: Path, at_end: bool) -> None:
    config = make_flat(tmp_path, "parquet", weight=1)
    megablend.build(config)
    pattern, _ = write(tmp_path / "new", "parquet")
    new = {"name": "n", "path": pattern, "column": "tokens", "weight": 0}

    def commit(more: dict[str, Any], **stage: Any) -> None:
        settings = {key: value for key, value in config.items() if key != "samples"}
        stages = [
            {"samples": 20},
            {"samples": 40, "new_data": True, "sources": {"n": {"weight": 1}}} | stage,
        ]
        edited = settings | {"sources": [*config["sources"], new | more], "stages": stages}
        with contextlib.suppress(ConfigError):  # it is refused, too, but the index is there
            megablend.build_index(edited)
        megablend.build(edited) if at_end else megablend.amend(edited, at=1)

    with pytest.raises(ConfigError, match="'n' has one token per row"):
        commit({"append_eod": 5001})
    with pytest.raises(
        ConfigError, match=r"'s' has one token per row.* or leave out `order: document`"
    ):
        commit({"documents": "file"}, order="document")
    commit({"append_eod": 5001, "documents": "file"})


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_token_documents_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = make_flat(tmp_path, kind, append_eod=5001) | {"split": "50,25,25"}
    with monkeypatch.context() as before:  # as versions that did not ask
        before.setattr("megablend.operations.build.refuse_token_documents", lambda *_: None)
        first = megablend.build(config)
    longer = megablend.build(config | {"samples": 30})
    assert longer.ledger.ends == (20, 30)
    assert longer.index.digest == first.index.digest
    says = "each token of 's' counts as a document"
    assert any(says in each for each in longer.warnings)
    assert any(
        says in each for each in megablend.describe(config | {"samples": 30}).to_dict()["warnings"]
    )
    assert any(says in each for each in megablend.check(config | {"samples": 30}).warnings)
    with pytest.raises(ConfigError, match="`documents: file`"):  # another run's first build
        megablend.build(config | {"run": "other"})


def test_documents_that_cannot_be(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"tokens": pa.array([[1]], pa.list_(pa.int32()))}), tmp_path / "x.parquet"
    )
    source = {"name": "s", "path": f"{tmp_path}/x.parquet", "column": "tokens", "documents": "file"}
    with pytest.raises(
        ConfigError,
        match="each list in column 'tokens' is already a document; remove `documents`",
    ):
        megablend.build(make_config(tmp_path, [source], samples=1))
    for value in ("files", {"eod_token": -1}, {"eod": 1}, 5, {"eod_token": True}):
        with pytest.raises(ConfigError, match=r"documents: found "):
            megablend.build(make_config(tmp_path, [source | {"documents": value}], samples=1))
    with pytest.raises(ConfigError, match="documents and extra_columns"):
        megablend.build(make_config(tmp_path, [source | {"extra_columns": ["x"]}], samples=1))
    with pytest.raises(
        ConfigError,
        match=r"not apply to raw files; remove it \(set `format_options: \{eod_token: ID\}`",
    ):
        megablend.build(make_config(tmp_path, [source | {"format": "raw"}], samples=1))
    pq.write_table(pa.table({"tokens": pa.array([1], pa.uint16())}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="eod_token 70000 does not fit the token dtype uint16"):
        megablend.build(
            make_config(tmp_path, [source | {"documents": {"eod_token": 70000}}], samples=1)
        )
