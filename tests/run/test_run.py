"""A run over an index that was made with other paths, or that cannot hold what the config asks for."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megablend
from megablend.arrays import Int64s
from megablend.order.base import Spans
from megablend.order.block import BlockOrder
from megablend.run.locator import _list_source
from tests.formats.writers import KINDS
from tests.runs import EOD, documents, make_config, read_samples, write_source


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    source = write_source(tmp_path / "data", 0, "parquet", documents(0, 60, 30, 5))
    return make_config(tmp_path, [source | {"append_eod": EOD}], samples=60, split="90,10")


def tokens(dataset: megablend.Dataset) -> torch.Tensor:
    return torch.tensor(np.stack([each.tokens[:-1] for each in read_samples(dataset)]))


def test_a_run_goes_on_when_a_path_in_another_folder_is_added(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    megablend.build(config)
    dataset = megablend.open(config)
    before = tokens(dataset)
    state = dataset.state_dict(40)
    (tmp_path / "data" / "more").mkdir()
    KINDS["parquet"].write(tmp_path / "data" / "more" / "9.parquet", [[900_001, 900_002]] * 9)
    (source,) = config["sources"]
    wider = config | {
        "sources": [source | {"path": [source["path"], f"{tmp_path}/data/more/*.parquet"]}]
    }
    assert megablend.build(wider).pinned
    assert torch.equal(tokens(megablend.open(wider)), before)
    assert torch.equal(tokens(megablend.open(wider, state=state)), before)


def test_data_is_read_where_the_config_says(tmp_path: Path, config: dict[str, Any]) -> None:
    megablend.build(config)
    before = tokens(megablend.open(config))
    (tmp_path / "data").rename(tmp_path / "moved")
    (source,) = config["sources"]
    moved = config | {"sources": [source | {"path": source["path"].replace("/data/", "/moved/")}]}
    assert torch.equal(tokens(megablend.open(moved)), before)
    with pytest.raises(megablend.DataError, match=f"{tmp_path}/data/source0/.*: no such file"):
        megablend.open(config)[0]
    for path in (tmp_path / "moved").glob("*/*"):
        path.unlink()
    with pytest.raises(megablend.DataError, match=f"{tmp_path}/moved/source0/.*: no such file"):
        megablend.open(moved)[0]


def test_an_end_of_document_token_that_does_not_fit_is_refused(config: dict[str, Any]) -> None:
    wrong = config | {"sources": [config["sources"][0] | {"append_eod": 2**31}]}
    says = r"sources\[0\]: source 's0': append_eod 2147483648 does not fit its tokens, .* int32 \(at most (\d+)\); use a smaller"
    with pytest.raises(megablend.ConfigError, match=says) as caught:
        megablend.build(wrong)
    most = re.search(says, str(caught.value))
    assert most
    megablend.build(config | {"sources": [config["sources"][0] | {"append_eod": int(most[1])}]})


def test_one_source_of_several_that_is_requested_otherwise_is_named(tmp_path: Path) -> None:
    sources = [
        write_source(tmp_path / "data", d, "parquet", documents(d, 60, 30, 5))
        | {"weight": 1, "append_eod": EOD}
        for d in range(3)
    ]
    given = make_config(tmp_path, sources, samples=60)
    megablend.build(given)
    for change, error, match in (
        (
            {"append_eod": 2**31},
            megablend.ConfigError,
            r"source 's2': append_eod 2147483648 does not fit its tokens",
        ),
        (
            {"column": "text"},
            megablend.PlanError,
            r"in which source 's2' has column 'ids'; the config has 'text'",
        ),
        (
            {"format": "arrow"},
            megablend.PlanError,
            r"in which source 's2' has format 'parquet'; the config has 'arrow'",
        ),
        (
            {"name": "s3"},
            megablend.PlanError,
            r"which has no source 's3' \(its sources: s0, s1, s2\)",
        ),
    ):
        with pytest.raises(error, match=match):
            megablend.open(given | {"sources": [*sources[:2], sources[2] | change]})


def test_sources_one_after_the_other_are_a_choice_of_the_config(tmp_path: Path) -> None:
    sources = [
        write_source(tmp_path / "data", d, "parquet", documents(d, 60, 30, 5)) for d in range(2)
    ]
    given = make_config(
        tmp_path,
        [source | {"weight": 1} for source in sources],
        samples=60,
        interleaving="sequential",
        run="in_turn",
    )
    digest = megablend.build(given).ledger.digest
    dataset = megablend.open(given)
    assert [each.source for each in read_samples(dataset, range(60))] == [0] * 30 + [1] * 30
    assert len(list(megablend.Loader(dataset, micro_batch_size=4))) == 15
    assert (
        megablend.build(given | {"interleaving": "lanes", "run": "lanes"}).ledger.digest != digest
    )
    with pytest.raises(megablend.PlanError, match="interleaving was sequential and is now lanes"):
        megablend.build(given | {"interleaving": "lanes"})


def test_an_unknown_interleaving_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(
        megablend.ConfigError,
        match=r"interleaving: found 'greedy', expected one of lanes, sequential$",
    ):
        megablend.build(config | {"interleaving": "greedy"})


def test_an_order_that_derives_from_another_is_asked_itself(config: dict[str, Any]) -> None:
    class AskedError(Exception):
        pass

    class Derived(BlockOrder):
        def spans(self, starts: Int64s, length: int | Int64s) -> Spans:
            raise AskedError

    megablend.build(config)
    run = megablend.open(config).run
    (reading,) = run.locator.readings(0)
    assert reading.listed is not None
    changed = reading._replace(order=Derived(reading.view, 0))
    run.locator._readings[0] = (changed._replace(listed=_list_source(changed)),)
    with pytest.raises(AskedError):
        run.locate_spans(np.zeros(3, np.int32), np.arange(3))
