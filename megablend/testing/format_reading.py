"""The first half of the contract of formats: documents that were written are read back, in any
order, from any thread or process."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np

from megablend.errors import DataError
from megablend.formats.base import (
    CHUNK_DTYPE,
    PLACED_BLOCK_DTYPE,
    Array,
    BlockReader,
    FileIndex,
    is_divisible,
)
from megablend.formats.fetch import read_blocks, read_pieces
from megablend.index.build.file_parts import join, part_span
from megablend.storage.by_scheme import make_storage
from megablend.testing.concurrency import run_threads, succeeds_in_a_fork
from megablend.testing.documents import DOCUMENTS, MIXED, join_pieces, list_pieces
from megablend.testing.expect import expect_error
from megablend.testing.format_files import FormatFiles
from megablend.testing.moved import SCHEME, MovedStorage


class FormatReading(FormatFiles):
    """Tests of indexing and reading valid files."""

    def test_documents_come_back(self, tmp_path: Path) -> None:
        """Documents are read as they were written. This includes files without documents, and
        documents that span several blocks."""
        for name, documents in DOCUMENTS.items():
            path = tmp_path / f"{name}{self.suffix}"
            self.write(path, documents)
            index = self.index(path)
            expected = self.as_read(documents)
            pieces = list_pieces(self.open(path, index), index.blocks, index.chunks, make_storage())
            assert list(join_pieces(index, pieces)) == expected, name
            assert (index.rows, index.tokens) == (len(expected), sum(map(len, expected))), name
            assert index.token_dtype == self.token_dtype

    def test_the_file_is_recognised(self, tmp_path: Path) -> None:
        """A file is recognised by its suffix and its content; the data file is the first of its
        files."""
        path = self.write_mixed(tmp_path)
        assert path.name.endswith(tuple(self.format.suffixes))
        assert self.format.recognizes(str(path), make_storage())
        assert self.format.files(str(path))[0] == str(path)
        assert (
            self.format.describe_unused_bytes(
                str(path), self.index(path).blocks, path.stat().st_size
            )
            is None
        )

    def test_the_block_table_adds_up(self, tmp_path: Path) -> None:
        """Counts and running sums of the block table are right, and its bytes are within the
        file."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        blocks = index.blocks
        assert (blocks.dtype, index.chunks.dtype) == (PLACED_BLOCK_DTYPE, CHUNK_DTYPE)
        assert len(blocks) > 3, "the contract needs several blocks: write smaller ones"
        assert blocks["tokens"].sum() == index.tokens
        assert blocks["rows"].sum() == index.rows
        assert blocks["ends"].sum() == sum(1 for document in self.as_read(MIXED) if document)
        assert (blocks["first_token"] == np.cumsum(blocks["tokens"]) - blocks["tokens"]).all()
        assert ((blocks["tokens"] > 0) | (blocks["rows"] > 0)).all(), (
            "a block has tokens or documents"
        )
        assert (np.diff(blocks["offset"]) >= 0).all(), "blocks are in file order"
        assert (blocks["offset"] + blocks["stored_bytes"] <= path.stat().st_size).all()
        assert blocks["chunk"].max() < len(index.chunks)

    def test_counting_without_documents_gives_the_same_tokens(self, tmp_path: Path) -> None:
        """An index that was made without counting documents has the same tokens, and the same rows
        if they are known."""
        path = self.write_mixed(tmp_path)
        exact = self.index(path)
        quick = self.index(path, documents=False)
        assert quick.tokens == exact.tokens
        assert not self.format.documents_known or (quick.blocks["rows"] >= 0).all()
        # Where rows are not known, blocks without tokens are not listed.
        ours, theirs = (index.blocks[index.blocks["tokens"] > 0] for index in (quick, exact))
        assert (
            ours[["offset", "tokens", "first_token"]] == theirs[["offset", "tokens", "first_token"]]
        ).all()
        known = ours["rows"] >= 0
        assert (ours[known] == theirs[known]).all()

    def test_an_index_is_deterministic_and_its_meta_survives_json(self, tmp_path: Path) -> None:
        """Two copies of a file have the same index, and `meta` is unchanged after conversion to
        JSON and back."""
        path = self.write_mixed(tmp_path)
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in self.format.files(str(path)):
            shutil.copy(name, copy)
        first = self.index(path)
        second = self.index(copy / path.name)
        assert first.blocks.tobytes() == second.blocks.tobytes()
        assert first.chunks.tobytes() == second.chunks.tobytes()
        assert (first.structure, first.meta) == (second.structure, second.meta)
        assert json.loads(json.dumps(first.meta)) == first.meta

    def test_parts_join_to_the_whole(self, tmp_path: Path) -> None:
        """A format that indexes files in parts gives the same index for any number of parts."""
        path = self.write_mixed(tmp_path)
        storage = make_storage()
        read = self.make_spec(self.column, True)
        whole = self.format.index(str(path), read, storage=storage)
        if not is_divisible(self.format):
            return
        size = path.stat().st_size
        for count in (1, 2, 7):
            spans = [part_span(size, part, count) for part in range(count)]
            parts = [
                self.format.index_part(str(path), read, span=span, storage=storage)
                for span in spans
            ]
            joined = join(parts)
            assert joined.blocks.tobytes() == whole.blocks.tobytes(), count
            assert joined.chunks.tobytes() == whole.chunks.tobytes(), count
            assert (joined.rows, joined.tokens) == (whole.rows, whole.tokens), count

    def test_blocks_come_in_any_order_and_more_than_once(self, tmp_path: Path) -> None:
        """Fifty random blocks have the same pieces as when all blocks are read. A request for no
        blocks returns no blocks."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        reader = self.open(path, index)
        whole = list_pieces(reader, index.blocks, index.chunks, make_storage())
        ids = np.random.default_rng(3).integers(0, len(index.blocks), 50)
        assert list_pieces(reader, index.blocks[ids], index.chunks, make_storage()) == [
            whole[i] for i in ids
        ]
        assert list(read_blocks(reader, index.blocks[:0], index.chunks, make_storage())) == []

    def test_pieces_alone_are_those_of_the_decoded_blocks(self, tmp_path: Path) -> None:
        """`find_pieces` agrees with `decode`, and checks the counts as `decode` does."""
        path = self.write_mixed(tmp_path)
        storage = make_storage()
        index = self.index(path)
        reader = self.open(path, index)
        ids = np.random.default_rng(3).integers(0, len(index.blocks), 20)
        offsets, scanned_bytes = read_pieces(reader, index.blocks[ids], index.chunks, storage)
        decoded = read_blocks(reader, index.blocks[ids], index.chunks, storage)
        assert [piece_offsets.tolist() for piece_offsets in offsets] == [
            block.offsets.tolist() for block in decoded
        ]
        assert (scanned_bytes == 0) == self.lengths_are_stored
        wrong: Array = index.blocks[1:2].copy()
        wrong["tokens"] += 1
        expect_error(
            DataError, re.escape(str(path)), read_pieces, reader, wrong, index.chunks, storage
        )

    def test_decoded_blocks_are_read_only_and_typed(self, tmp_path: Path) -> None:
        """Arrays of decoded blocks, which readers share, have the declared dtypes; tokens are
        read-only."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        for block in read_blocks(
            self.open(path, index), index.blocks, index.chunks, make_storage()
        ):
            assert block.tokens.dtype == np.dtype(self.token_dtype)
            assert block.offsets.dtype == np.dtype("int64")
            assert (block.offsets[0], block.offsets[-1]) == (0, len(block.tokens))
            assert not block.tokens.flags.writeable

    def test_bytes_come_from_the_storage_only(self, tmp_path: Path) -> None:
        """The format opens no file itself: it reads the same data from a storage without
        descriptors."""
        path = self.write_mixed(tmp_path)
        moved = MovedStorage(make_storage())
        location = f"{SCHEME}{path}"
        local = self.index(path)
        index = self.index(location, storage=moved)
        assert index.blocks.tobytes() == local.blocks.tobytes()
        assert index.structure == local.structure
        pieces = list_pieces(
            self.open(location, index, storage=moved), index.blocks, index.chunks, moved
        )
        assert list(join_pieces(index, pieces)) == self.as_read(MIXED)

    def test_threads_share_a_reader(self, tmp_path: Path) -> None:
        """Four threads that read random blocks through one reader get the right pieces."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        reader = self.open(path, index)
        whole = list_pieces(reader, index.blocks, index.chunks, make_storage())
        agrees: list[bool] = []

        def read(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for _ in range(20):
                ids = rng.integers(0, len(index.blocks), 5)
                pieces = list_pieces(reader, index.blocks[ids], index.chunks, make_storage())
                agrees.append(pieces == [whole[i] for i in ids])

        run_threads(read)
        assert agrees == [True] * 80

    def test_a_reader_works_after_a_fork(self, tmp_path: Path) -> None:
        """A reader works in a forked process, even if its parent has read from it before."""
        path = self.write_mixed(tmp_path)
        index = self.index(path)
        reader = self.open(path, index)
        whole = list_pieces(reader, index.blocks, index.chunks, make_storage())
        assert succeeds_in_a_fork(
            lambda: list_pieces(reader, index.blocks, index.chunks, make_storage()) == whole,
        )

    def test_readers_and_indexes_pickle(self, tmp_path: Path) -> None:
        """Pickled copies of an index and a reader, which are sent to other processes, give the same
        documents."""
        path = self.write_mixed(tmp_path)
        index: FileIndex = pickle.loads(pickle.dumps(self.index(path)))
        reader: BlockReader = pickle.loads(pickle.dumps(self.open(path, index)))
        pieces = list_pieces(reader, index.blocks, index.chunks, make_storage())
        assert list(join_pieces(index, pieces)) == self.as_read(MIXED)
