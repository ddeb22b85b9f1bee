"""From files to samples: every token of every document as often as its epochs say, whoever reads and however often it stops."""

import io
import itertools
import pickle
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import megablend
from megablend.order.block import BlockOrder
from megablend.order.document import DocumentOrder
from megablend.order.registry import ORDERS
from tests.examples import examples
from tests.formats.writers import KINDS
from tests.runs import EOD, documents, make_config, read_samples, write_source

Read = dict[tuple[int, int], list[int]]
"""Tokens of each (source, ordinal)."""


def read_all(dataset: megablend.Dataset) -> Read:
    found: Read = {}
    for sample in read_samples(dataset):
        assert (sample.source, sample.ordinal) not in found
        found[sample.source, sample.ordinal] = sample.tokens.tolist()
    return found


def stream(listed: Sequence[Sequence[int] | None], eod: int | None) -> list[int]:
    """All tokens of a source, once."""
    ends = [] if eod is None else [eod]
    return [token for document in listed if document for token in [*document, *ends]]


def check_source(samples: dict[int, list[int]], tokens: list[int], length: int, extra: int) -> None:
    """A source's samples, laid end to end, are its epochs: each holds every token once, the last one as far as it goes."""
    ordinals = sorted(samples)
    assert ordinals == list(range(len(ordinals)))
    laid = [token for ordinal in ordinals for token in samples[ordinal][:length]]
    if ordinals:
        laid += samples[ordinals[-1]][length:]
    for ordinal in ordinals[:-1]:
        if extra:
            assert samples[ordinal][length] == samples[ordinal + 1][0]
    for start in range(0, len(laid), len(tokens)):
        epoch = Counter(laid[start : start + len(tokens)])
        whole = Counter(tokens)
        assert epoch == whole if start + len(tokens) <= len(laid) else epoch <= whole


@pytest.fixture
def levels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both levels of the page and row orders, on few blocks, where this is asked for."""
    levels: str = request.param
    if levels == "two":
        for name, make in (
            ("block", partial(BlockOrder, threshold=3, groups=4)),
            ("document", partial(DocumentOrder, threshold=3, group=7)),
        ):
            monkeypatch.setitem(ORDERS, name, replace(ORDERS[name], make=make))
    return levels


@pytest.mark.parametrize(
    ("order", "levels", "lanes"),
    [
        ("page", "one", 1),
        ("page", "one", 64),
        ("page", "two", 4),
        ("page", "two", 64),
        ("row", "one", 4),
        ("row", "one", 64),
        ("row", "two", 1),
        ("row", "two", 64),
        ("sequential", "one", 1),
        ("sequential", "one", 4),
        ("sequential", "one", 64),
    ],
    indirect=["levels"],
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_token_as_often_as_its_epochs_say(
    tmp_path: Path, levels: str, kind: str, order: str, lanes: int
) -> None:
    listed = [
        documents(d, size, longest, seed=lanes)
        for d, (size, longest) in enumerate([(60, 40), (25, 9), (1, 5)])
    ]
    listed[2] = [[200_001, 200_002, 200_003]]  # shorter than a sample
    sources = [write_source(tmp_path, d, kind, docs) for d, docs in enumerate(listed)]
    eods = [None, EOD, EOD]
    for source, weight, eod in zip(sources, ["0.6", "0.3", "0.1"], eods, strict=True):
        source |= {"weight": weight, "append_eod": eod}
    config = make_config(tmp_path, sources, lanes=lanes, order=order, samples=331)
    megablend.build(config)
    read = read_all(megablend.open(config))
    assert Counter(source for source, _ in read) == {0: 199, 1: 99, 2: 33}
    for d, docs in enumerate(listed):
        check_source(
            {o: t for (source, o), t in read.items() if source == d}, stream(docs, eods[d]), 8, 1
        )


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=4),
    st.integers(1, 70),
    st.integers(1, 5),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(["100", "90,10,0", "50,25,25"]),
    st.sampled_from(["page", "row"]),
    st.integers(0, 10**6),
)
def test_any_run(
    tmp_path_factory: pytest.TempPathFactory,
    kinds: list[str],
    lanes: int,
    cycle: int,
    length: int,
    extra: bool,
    split: str,
    order: str,
    seed: int,
) -> None:
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("run")
    listed = [
        documents(d, rng.randrange(8, 60), rng.choice([3, 30, 200]), seed)
        for d in range(len(kinds))
    ]
    for d, docs in enumerate(listed):
        docs[:4] = [[d * 100_000 + 50_000 + 3 * i + j for j in range(3)] for i in range(4)]
        docs[-2:] = [[d * 100_000 + 60_000 + 3 * i + j for j in range(3)] for i in range(2)]
    eods = [rng.choice([None, EOD]) for _ in kinds]
    sources = [
        write_source(folder, d, kind, listed[d], num_files=rng.choice([1, 3]))
        for d, kind in enumerate(kinds)
    ]
    for source, eod in zip(sources, eods, strict=True):
        source |= {"weight": rng.randrange(1, 10), "append_eod": eod}
    config = make_config(
        folder,
        sources,
        lanes=lanes,
        shuffle_window=cycle,
        sequence_length=length,
        samples=rng.randrange(20 * len(kinds), 300),
        split=split,
        order=order,
        seed=seed,
        add_extra_token_to_sequence=extra,
    )
    megablend.build(config)
    read = read_all(megablend.open(config))
    shares = [float(part) for part in split.split(",")]
    for d, docs in enumerate(listed):
        train = docs[: round(len(docs) * shares[0] / sum(shares))]
        check_source(
            {o: t for (source, o), t in read.items() if source == d},
            stream(train, eods[d]),
            length,
            int(extra),
        )


def test_splits_share_no_document_and_leave_none_out(tmp_path: Path) -> None:
    listed = [documents(d, 40, 25, seed=1) for d in range(len(KINDS))]
    sources = [
        write_source(tmp_path, d, kind, docs)
        for d, (kind, docs) in enumerate(zip(KINDS, listed, strict=True))
    ]
    for source in sources:
        source |= {"weight": 1, "append_eod": EOD}
    config = make_config(
        tmp_path,
        sources,
        sequence_length=1,
        add_extra_token_to_sequence=False,
        split="70,20,10",
        epochs=1,
    )
    megablend.build(config)
    for d, docs in enumerate(listed):
        for split, low, high in (("valid", 28, 36), ("test", 36, 40)):
            read = read_all(megablend.open(config, split))
            mine = [read[source, o][0] for source, o in sorted(read) if source == d]
            assert mine == stream(docs[low:high], EOD)  # one unblended pass, in order


def batches(
    dataset: megablend.Dataset,
    micro_batch: int,
    size: int,
    start: int | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Tokens of each micro step, over all data-parallel ranks."""
    ranks = [
        megablend.Loader(
            dataset,
            micro_batch_size=micro_batch,
            data_parallel_rank=rank,
            data_parallel_size=size,
            consumed_samples=start,
            **options,
        )
        for rank in range(size)
    ]
    return [torch.cat([batch["tokens"] for batch in step]) for step in zip(*ranks, strict=True)]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """A run over three formats."""
    kinds = ["parquet", "arrow", "megatron"]
    sources = [
        write_source(tmp_path, d, kind, documents(d, 60, 30, seed=3))
        for d, kind in enumerate(kinds)
    ]
    for source, weight in zip(sources, (5, 3, 2), strict=True):
        source |= {"weight": weight, "append_eod": EOD}
    config = make_config(tmp_path, sources, samples=240, split="90,10,0")
    megablend.build(config)
    return config


@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_share_the_steps_and_change_nothing(config: dict[str, Any], size: int) -> None:
    dataset = megablend.open(config)
    whole = torch.from_numpy(np.stack([each.tokens[:-1] for each in read_samples(dataset)]))
    steps = batches(dataset, 3, size)
    assert len(steps) == 240 // (3 * size)
    assert torch.equal(torch.cat(steps), whole[: len(steps) * 3 * size])


@pytest.mark.parametrize(
    ("workers", "context"),
    [(1, "fork"), (4, "fork"), pytest.param(4, "spawn", marks=pytest.mark.slow)],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_change_nothing(config: dict[str, Any], workers: int, context: str) -> None:
    dataset = megablend.open(config)
    dataset[0]  # files are open when the workers fork
    alone = batches(dataset, 8, 1)
    found = batches(
        megablend.open(config), 8, 1, num_workers=workers, multiprocessing_context=context
    )
    assert len(found) == len(alone) == 30
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


_READ_ALL = """
import pickle, sys, torch
datasets = pickle.load(sys.stdin.buffer)
torch.save([[dataset[k] for k in range(len(dataset))] for dataset in datasets], sys.argv[1])
"""


def test_another_process_reads_the_same(config: dict[str, Any], tmp_path: Path) -> None:
    heavier = {"samples": 240, "sources": {"s1": {"weight": 9}}}
    ways: tuple[dict[str, Any], ...] = (
        {"inter_document_masking": True},
        {"samples": None, "stages": [{"samples": 120}, heavier]},
    )
    datasets = list[megablend.Dataset]()
    for order in ORDERS:
        for number, settings in enumerate(ways):
            whole = config | {"order": order, "run": f"{order}-{number}"} | settings
            used = {key: value for key, value in whole.items() if value is not None}
            megablend.build(used)
            datasets += [megablend.open(used, split) for split in ("train", "valid")]
    expected = [[dataset[k] for k in range(len(dataset))] for dataset in datasets]
    command = [sys.executable, "-c", _READ_ALL, str(tmp_path / "samples")]
    subprocess.run(command, input=pickle.dumps(datasets), check=True, timeout=300)
    found = torch.load(tmp_path / "samples", weights_only=False)
    for own, others in zip(expected, found, strict=True):
        for sample, other in zip(own, others, strict=True):
            assert sample.keys() == other.keys()
            for name, value in sample.items():
                np.testing.assert_array_equal(value, other[name])


class _Interrupted(pickle.Pickler):
    """Calls a function before one of megablend's objects, given by its number, is pickled, as another thread may."""

    def __init__(self, file: io.BytesIO, at: int, call: Callable[[], Any]) -> None:
        super().__init__(file)
        self.num_left = at
        self._call = call

    def reducer_override(self, found: Any) -> Any:
        if type(found).__module__.startswith("megablend."):
            self.num_left -= 1
            if self.num_left == -1:
                self._call()
        return NotImplemented


@pytest.mark.parametrize("is_used", [False, True])
def test_it_is_pickled_while_another_thread_reads(config: dict[str, Any], is_used: bool) -> None:
    first: dict[str, Any] = {"samples": 80, "sources": {"s2": {"weight": 0}}}
    stages = [
        first,
        {"samples": 160, "sources": {"s1": {"weight": 9}}},
        {"samples": 240, "sources": {"s2": {"weight": 9}}},
    ]
    del config["samples"]
    config |= {"order": "document", "run": "stages", "stages": stages}
    megablend.build(config)
    expected = megablend.open(config)[239]["tokens"]
    for number in itertools.count():
        dataset = megablend.open(config)
        if is_used:
            dataset.__getitems__(range(0, 160, 20))  # two of the stages and of the sources
        file = io.BytesIO()
        pickler = _Interrupted(file, number, partial(dataset.__getitems__, range(0, 240, 10)))
        pickler.dump(dataset)
        assert torch.equal(pickle.loads(file.getvalue())[239]["tokens"], expected)
        if pickler.num_left >= 0:
            break


@pytest.mark.parametrize("seed", range(6))
def test_resumed_anywhere_with_other_ranks(config: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    dataset = megablend.open(config)
    whole = torch.from_numpy(np.stack([each.tokens[:-1] for each in read_samples(dataset)]))
    size = rng.choice([1, 2, 4, 8])
    micro_batch = rng.choice([1, 2, 3])
    loader = megablend.Loader(
        dataset, micro_batch_size=micro_batch, data_parallel_rank=size - 1, data_parallel_size=size
    )
    for _ in zip(range(rng.randrange(1, 10)), loader, strict=False):
        state = loader.state_dict()
    consumed = state["consumed_samples"]
    assert consumed % (size * micro_batch) == 0
    size = rng.choice([1, 2, 4, 8])
    micro_batch = rng.choice([1, 2, 3])
    again = torch.cat(batches(megablend.open(config, state=state), micro_batch, size))
    assert torch.equal(again, whole[consumed : consumed + len(again)])
    assert len(again) > len(whole) - consumed - size * micro_batch
    assert torch.equal(
        again,
        torch.cat(batches(megablend.open(config, consumed_samples=consumed), micro_batch, size)),
    )


def test_document_starts_are_where_documents_start(config: dict[str, Any]) -> None:
    dataset = megablend.open(config, "valid")
    for k in range(len(dataset)):
        sample = dataset.sample(k)
        after_eod = np.flatnonzero(sample.tokens == EOD) + 1
        assert set(after_eod[after_eod < len(sample.tokens)]) <= set(sample.starts.tolist())
        for low, high in zip(sample.starts, [*sample.starts[1:], len(sample.tokens)], strict=True):
            piece = sample.tokens[low:high]
            inner = piece[:-1] if piece[-1] == EOD else piece
            assert (np.diff(inner) == 1).all()  # one document's tokens, in order


def test_none_gives_a_padding_sample(config: dict[str, Any]) -> None:
    dataset = megablend.open(config)
    padding = dataset[None]
    assert torch.equal(padding["tokens"], dataset[0]["tokens"])
    assert padding["loss_mask"].sum() == 0


@pytest.mark.parametrize("k", [-1, 240, 10**9, 10**30, -(10**30)])
def test_samples_out_of_range(config: dict[str, Any], k: int) -> None:
    with pytest.raises(IndexError, match=rf"{k} is out of range: the plan has 240 samples"):
        megablend.open(config)[k]


@pytest.mark.parametrize("sign", [1, -1])
def test_samples_of_numbers_that_python_does_not_write(config: dict[str, Any], sign: int) -> None:
    dataset = megablend.open(config)
    read: Callable[[int], object]
    for read in (dataset.__getitem__, dataset.sample, lambda k: dataset.samples([k])):
        with pytest.raises(IndexError, match="of more than 100 digits is out of range"):
            read(sign * 10**5_000)


@pytest.mark.parametrize("k", [1.0, "1", slice(0, 3)])
def test_samples_are_integers(config: dict[str, Any], k: Any) -> None:
    dataset = megablend.open(config)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        dataset[k]
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        dataset.sample(k)
    assert torch.equal(dataset[np.int64(3)]["tokens"], dataset[3]["tokens"])
