"""Make the golden files of tests/golden: small files by other writers, and what pyarrow reads from them.

    python tools/make_golden.py tests/golden

Each writer gets a virtual environment of its own, in a temporary folder that is deleted afterwards (`--venvs DIR` keeps and
reuses them). It is handed this script and makes its files; then this process reads them with its own, recent, pyarrow and
writes `expected.json`: file -> column and contents, by number; contents -> length of each row (nulls left out), tokens.

Made once: a golden file is never changed, since it stands for what has been written in the field.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import venv
from importlib import import_module
from pathlib import Path
from typing import Any

WRITERS = {
    "pyarrow14": ("pyarrow==14.*", "numpy<2"),
    "pyarrow18": ("pyarrow==18.*", "numpy<2.3"),
    "pyarrow21": ("pyarrow==21.*",),
    "pyarrow26": ("pyarrow==26.*",),
    "polars": ("polars==2.1.*",),
    "duckdb": ("duckdb==2.0.*",),
    "fastparquet": ("fastparquet==2026.9.*",),
    "clickhouse": ("chdb==4.4.*",),
    "spark": ("pyspark==4.3.*",),
    "datafusion": ("datafusion==55.*", "pyarrow==26.*"),
}

List = list[int | None] | None


def documents(seed: int, *, nulls: bool = True, low: int = 0, high: int = 40_000) -> list[List]:
    """Rows of every kind: short, longer than a page, empty, null, with null elements."""
    rng = random.Random(seed)
    rows: list[List] = []
    for i in range(50):
        row: list[int | None] = [rng.randrange(low, high) for _ in range(rng.choice([1, 3, 8, 20]))]
        if nulls and i % 7 == 2:
            row[0] = None
        rows.append(None if nulls and i % 11 == 5 else [] if i % 9 == 4 else row)
    rows[30] = [rng.randrange(low, high) for _ in range(300)]
    return rows


def flat(seed: int) -> list[int | None]:
    """Single tokens, some of them null."""
    rng = random.Random(seed)
    return [None if rng.random() < 0.1 else rng.randrange(40_000) for _ in range(400)]


def write_pyarrow(out: Path, name: str) -> None:
    """Parquet with each kind of page, codec, encoding and column, and Arrow files."""
    pa = import_module("pyarrow")
    pq = import_module("pyarrow.parquet")
    index = {"write_page_index": True}
    index |= {"write_page_checksum": True} if name != "pyarrow14" else {}
    int32 = pa.list_(pa.int32())
    texts = [f"text {i}" for i in range(50)]
    plain: dict[str, Any] = {"use_dictionary": False, "data_page_size": 300, "write_batch_size": 8}
    required = pa.schema(
        [pa.field("ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False)]
    )
    lists = pa.table({"text": texts, "ids": pa.array(documents(1), int32)})
    record = pa.array(
        [
            None if i % 13 == 6 else {"text": texts[i], "ids": row}
            for i, row in enumerate(documents(2))
        ]
    )
    parquet: dict[str, tuple[Any, dict[str, Any]]] = {
        "default": (lists, {}),
        "small_pages_v1": (lists, {**plain, "compression": "none"}),
        "small_pages_v1_indexed": (
            lists,
            {**plain, **index, "compression": "lz4", "row_group_size": 20},
        ),
        "small_pages_v2": (lists, {**plain, "compression": "zstd", "data_page_version": "2.0"}),
        "small_pages_v2_indexed": (
            lists,
            {**plain, **index, "compression": "snappy", "data_page_version": "2.0"},
        ),
        "dictionary_pages": (
            lists,
            {"data_page_size": 100, "write_batch_size": 8, "dictionary_pagesize_limit": 800},
        ),
        "delta": (
            lists,
            {
                **plain,
                "column_encoding": {"ids.list.element": "DELTA_BINARY_PACKED"},
                "compression": "gzip",
            },
        ),
        "required": (
            pa.table({"ids": documents(3, nulls=False)}, schema=required),
            {**plain, "compression": "brotli"},
        ),
        "nested": (pa.table({"record": record}), {**plain, **index}),
        "large_list_int64": (
            pa.table({"ids": pa.array(documents(4, low=-5), pa.large_list(pa.int64()))}),
            plain,
        ),
        "fixed_size_list": (
            pa.table(
                {"ids": pa.array(pairs(5, nulls=name > "pyarrow21"), pa.list_(pa.int32(), 2))}
            ),
            plain,
        ),
        "uint16": (
            pa.table({"ids": pa.array(documents(6), pa.list_(pa.uint16()))}),
            {**plain, **index},
        ),
        "uint32_flat": (
            pa.table({"ids": pa.array(flat(7), pa.uint32())}),
            {**plain, "compression": "zstd"},
        ),
    }
    if name != "pyarrow14":  # reads this encoding of integers, does not write it
        options = {**plain, "column_encoding": {"ids.list.element": "BYTE_STREAM_SPLIT"}}
        parquet["byte_stream_split"] = (lists, options)
    for case, (table, options) in parquet.items():
        pq.write_table(table, out / f"{name}_{case}.parquet", **options)
    for codec in (None, "lz4", "zstd"):
        path = str(out / f"{name}_{codec or 'plain'}.arrow")
        with pa.ipc.new_file(
            path, lists.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
        ) as writer:
            writer.write_table(lists, max_chunksize=20)


def pairs(seed: int, *, nulls: bool) -> list[List]:
    """Rows of two elements each; pyarrow up to 21 cannot write null ones."""
    rng = random.Random(seed)
    return [
        None if nulls and i % 7 == 3 else [rng.randrange(40_000), None if i % 5 == 1 else 1]
        for i in range(60)
    ]


def write_polars(out: Path, name: str) -> None:
    """Parquet and Arrow of lists beside text, and of flat integers."""
    pl = import_module("polars")
    texts = [f"a text of some length {i}" for i in range(50)]
    lists = pl.DataFrame(
        {"text": texts, "ids": documents(11)}, schema={"text": pl.String, "ids": pl.List(pl.Int32)}
    )
    for codec in ("uncompressed", "snappy", "lz4", "zstd"):
        lists.write_parquet(
            out / f"{name}_{codec}.parquet",
            compression=codec,
            data_page_size=300,
            row_group_size=30,
        )
    single = pl.DataFrame({"ids": flat(12)}, schema={"ids": pl.UInt16})
    single.write_parquet(out / f"{name}_flat.parquet", data_page_size=300)
    for codec in ("uncompressed", "lz4", "zstd"):
        lists.write_ipc(out / f"{name}_{codec}.arrow", compression=codec, record_batch_size=20)


def write_duckdb(out: Path, name: str) -> None:
    """Parquet of lists and flat integers, V1 and V2."""
    connection = import_module("duckdb").connect()
    connection.execute("CREATE TABLE lists (text VARCHAR, ids INTEGER[])")
    connection.executemany(
        "INSERT INTO lists VALUES (?, ?)",
        [[f"text {i}", row] for i, row in enumerate(documents(21))],
    )
    connection.execute("CREATE TABLE flat (ids BIGINT)")
    connection.executemany("INSERT INTO flat VALUES (?)", [[value] for value in flat(22)])
    for table in ("lists", "flat"):
        for codec, version in (
            ("uncompressed", "V1"),
            ("snappy", "V1"),
            ("zstd", "V2"),
            ("lz4_raw", "V2"),
        ):
            path = out / f"{name}_{table}_{codec}_{version.lower()}.parquet"
            options = f"FORMAT parquet, COMPRESSION {codec}, PARQUET_VERSION {version}"
            connection.execute(f"COPY {table} TO '{path}' ({options})")


def write_fastparquet(out: Path, name: str) -> None:
    """Parquet of flat integers, which is all that it writes: with and without nulls, V1 and V2."""
    pd = import_module("pandas")
    fastparquet = import_module("fastparquet")
    nullable = pd.DataFrame({"ids": pd.array(flat(31), dtype="Int64")})
    full = pd.DataFrame({"ids": pd.array([value or 0 for value in flat(32)], dtype="int32")})
    for version in (1, 2):
        fastparquet.writer.DATAPAGE_VERSION = version
        for codec in ("UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD"):
            for case, frame in (("nulls", nullable), ("full", full)):
                path = out / f"{name}_{case}_{codec.lower()}_v{version}.parquet"
                fastparquet.write(str(path), frame, compression=codec, row_group_offsets=[0, 150])
        # Its footer says `repetition_type` by a bool: Thrift's readers pass over it, and take the column as required.
        path = out / f"{name}_inferred_zstd_v{version}.parquet"
        fastparquet.write(
            str(path), full, compression="ZSTD", row_group_offsets=[0, 150], has_nulls="infer"
        )


def write_clickhouse(out: Path, name: str) -> None:
    """Parquet of flat and nested integers, with and without nulls. Where a dictionary overflows in the middle of a chunk, its
    histograms of levels count some pages twice."""
    chdb = import_module("chdb")
    value = "toInt32(cityHash64(number) % 40000)"
    queries = {
        "flat": f"SELECT {value} AS ids FROM numbers(700)",
        "nulls": f"SELECT if(number % 11 = 5, NULL, toNullable({value})) AS ids FROM numbers(700)",
        "lists": "SELECT arrayMap(x -> if(x % 5 = 1, NULL, toInt32(cityHash64(x, number) % 40000)), range(number % 20)) AS ids, "
        "toString(number) AS text FROM numbers(120)",
        "full_lists": "SELECT arrayMap(x -> toInt32(cityHash64(x, number) % 40000), range(number % 20)) AS ids FROM numbers(120)",
    }
    settings = "output_format_parquet_data_page_size=500, output_format_parquet_batch_size=64"
    for case, query in queries.items():
        for kind, more in (
            ("dictionary", ""),
            ("overflow", ", output_format_parquet_max_dictionary_size=2000"),
        ):
            path = out / f"{name}_{case}_{kind}.parquet"
            chdb.query(
                f"{query} INTO OUTFILE '{path}' TRUNCATE FORMAT Parquet SETTINGS {settings}{more}"
            )


def write_spark(out: Path, name: str) -> None:
    """Parquet by Java's library: lists in both layouts and flat integers, V1 and V2. Needs Java 17."""
    session = import_module("pyspark.sql").SparkSession.builder.master("local[1]").getOrCreate()
    small = {"page.size": 256, "page.row.count.limit": 20, "page.size.row.check.min": 1}
    tables = {
        "lists": ([[f"text {i}", row] for i, row in enumerate(documents(41))], "array<int>"),
        "flat": ([["", value] for value in flat(42)], "bigint"),
    }
    for case, codec, version, options in (
        ("lists", "snappy", 1, {"dictionary.page.size": 400}),
        ("lists", "zstd", 2, {"enable.dictionary": False}),
        ("lists", "gzip", 2, {"bloom.filter.enabled": True, "bloom.filter.max.bytes": 64}),
        ("legacy", "lz4_raw", 1, {"enable.dictionary": False}),
        ("flat", "snappy", 1, {}),
        ("flat", "zstd", 2, {"enable.dictionary": False}),
    ):
        rows, kind = tables.get(case, tables["lists"])
        session.conf.set("spark.sql.parquet.writeLegacyFormat", case == "legacy")
        frame = session.createDataFrame(rows, f"text string, ids {kind}").coalesce(1)
        writer = frame.write.mode("overwrite").option("compression", codec)
        writer = writer.option("parquet.writer.version", f"v{version}")
        for key, value in (small | options).items():
            writer = writer.option(f"parquet.{key}", value)
        with tempfile.TemporaryDirectory() as scratch:
            writer.parquet(scratch)
            (written,) = Path(scratch).glob("*.parquet")
            written.rename(out / f"{name}_{case}_{codec}_v{version}.parquet")
    session.stop()


def write_datafusion(out: Path, name: str) -> None:
    """Parquet by Rust's library: lists, V1 and V2, with page indexes."""
    pa = import_module("pyarrow")
    datafusion = import_module("datafusion")
    table = pa.table({"ids": pa.array(documents(51), pa.list_(pa.int32()))})
    for codec, version, encoding in (
        ("snappy", 1, None),
        ("lz4_raw", 1, "delta_binary_packed"),
        ("zstd(3)", 2, "delta_binary_packed"),
        ("uncompressed", 2, "byte_stream_split"),
    ):
        options = datafusion.ParquetWriterOptions(
            compression=codec,
            writer_version=f"{version}.0",
            encoding=encoding,
            dictionary_enabled=encoding is None,
            dictionary_page_size_limit=400,
            data_pagesize_limit=300,
            write_batch_size=16,
            max_row_group_size=30,
            statistics_enabled="page",
        )
        path = out / f"{name}_{codec.partition('(')[0]}_v{version}.parquet"
        frame = datafusion.SessionContext().from_arrow(table)
        frame.write_parquet_with_options(str(path), options)


def expectation(path: Path) -> tuple[str, dict[str, list[int]]]:
    """What pyarrow reads: the column's name; the length of each row, and the tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()
    nested = "record" in table.column_names
    values = table.column("record" if nested else "ids").to_pylist()
    if nested:
        values = [value and value["ids"] for value in values]
    rows = [value if isinstance(value, list) else [value] for value in values]
    kept = [[token for token in row if token is not None] for row in rows]
    contents = {
        "lengths": [len(row) for row in kept],
        "tokens": [token for row in kept for token in row],
    }
    return "record.ids" if nested else "ids", contents


def write_expected(out: Path) -> None:
    """Write what all files hold, equal contents once."""
    contents: list[dict[str, list[int]]] = []
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in out.iterdir() if path.suffix in (".parquet", ".arrow")):
        column, found = expectation(path)
        if found not in contents:
            contents.append(found)
        files[path.name] = {"column": column, "contents": contents.index(found)}
    lines = [f'"files": {json.dumps(files, indent=1)}', '"contents": [']
    lines[1] += ",\n".join(json.dumps(each, separators=(",", ":")) for each in contents) + "]"
    (out / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def run_writer(name: str, requirements: tuple[str, ...], venvs: Path, out: Path) -> None:
    """Make a writer's environment, and its files in it."""
    python = venvs / name / "bin" / "python"
    if not python.exists():
        venv.create(venvs / name, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
    subprocess.run([python, __file__, str(out), "--writer", name], check=True)


def main() -> None:
    """Make all files, or, within an environment, those of one writer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--venvs", type=Path, help="folder of environments to keep and reuse")
    parser.add_argument("--writer", choices=WRITERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.writer:
        kind = arguments.writer.rstrip("0123456789")
        getattr(sys.modules[__name__], f"write_{kind}")(arguments.out, arguments.writer)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, requirements in WRITERS.items():
            run_writer(name, requirements, arguments.venvs or Path(scratch), arguments.out)
    write_expected(arguments.out)


if __name__ == "__main__":
    main()
