"""The benchmark of shuffle quality: its orders are permutations of what they say, its numbers are those of naive twins."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from neighbours import autocorrelation, distance_moved, neighbours
from quality import table
from strategies import STRATEGIES, Setting
from tiny_model import TinyModel, evaluate
from topics import make_corpus, topic_of
from train_order import learning_rate, train

from tests.examples import examples

ROOT = Path(__file__).parent.parent.parent
SETTINGS = st.builds(
    Setting,
    num_tokens=st.integers(30, 400),
    sequence_length=st.integers(1, 9),
    page_tokens=st.integers(1, 60),
    buffer=st.integers(1, 40),
    batch=st.integers(1, 7),
)


@pytest.mark.parametrize("name", STRATEGIES)
@examples(60)
@given(setting=SETTINGS, seed=st.integers(0, 99))
def test_an_order_has_every_sample_once(name: str, setting: Setting, seed: int) -> None:
    found = STRATEGIES[name](setting, np.random.default_rng(seed))
    assert found.shape == (setting.num_samples, setting.sequence_length + 1)
    places = found[:, :-1].ravel()
    assert len(np.unique(places)) == len(places)
    assert 0 <= places.min() <= places.max() < setting.num_tokens
    if name != "refilled page buffer":  # whose samples are cut from shuffled pages
        assert (np.diff(found, axis=1) == 1).all()
        assert (
            np.sort(found[:, 0]) == np.arange(setting.num_samples) * setting.sequence_length
        ).all()


@examples(60)
@given(setting=SETTINGS, seed=st.integers(0, 99))
def test_a_window_gives_nothing_that_it_cannot_have_read(setting: Setting, seed: int) -> None:
    samples = (
        STRATEGIES["window"](setting, np.random.default_rng(seed))[:, 0] // setting.sequence_length
    )
    assert (samples < np.arange(len(samples)) + setting.buffer).all()


@examples(60)
@given(setting=SETTINGS, seed=st.integers(0, 99))
def test_a_refilled_buffer_reads_whole_pages_and_holds_no_more_than_its_size(
    setting: Setting, seed: int
) -> None:
    found = STRATEGIES["refilled page buffer"](setting, np.random.default_rng(seed))
    # As they are first met
    pages = list(dict.fromkeys((found // setting.page_tokens).ravel().tolist()))
    assert set(pages) <= set(range(-(-setting.num_tokens // setting.page_tokens)))
    inside = np.diff(found, axis=1) == 1
    assert inside[found[:, 1:] % setting.page_tokens != 0].all(), (
        "tokens of a page stay together in a sample"
    )
    order = (
        np.random.default_rng(seed)
        .permutation(-(-setting.num_tokens // setting.page_tokens))
        .tolist()
    )
    tokens = [
        p for page in order for p in range(setting.num_tokens) if p // setting.page_tokens == page
    ]
    samples = [tokens.index(int(first)) // setting.sequence_length for first in found[:, 0]]
    assert sorted(samples) == list(range(setting.num_samples))
    ahead = (
        max(setting.buffer, setting.page_tokens // setting.sequence_length + 1) + setting.batch + 1
    )
    assert all(sample < place + ahead for place, sample in enumerate(samples))


def test_a_full_shuffle_differs_by_seed_and_moves_samples_by_a_third() -> None:
    setting = Setting(num_tokens=20_001, sequence_length=4, page_tokens=64, buffer=8, batch=4)
    orders = [STRATEGIES["full"](setting, np.random.default_rng(seed))[:, 0] for seed in (0, 0, 1)]
    assert (orders[0] == orders[1]).all()
    assert (orders[0] != orders[2]).any()
    assert distance_moved(orders[0]) == pytest.approx(1 / 3, abs=0.02)


@examples(100)
@given(labels=st.lists(st.integers(0, 4), min_size=12, max_size=60), batch=st.integers(1, 12))
def test_neighbours_and_autocorrelation_are_those_of_loops(labels: list[int], batch: int) -> None:
    whole = [labels[i : i + batch] for i in range(0, len(labels) - batch + 1, batch)]
    others = [row.count(label) - 1 for row in whole for label in row]
    assert neighbours(np.array(labels), batch) == pytest.approx(sum(others) / len(others))

    chance = sum((labels.count(label) / len(labels)) ** 2 for label in set(labels))
    means = []
    for lag in range(2, 5):
        pairs = list(zip(labels, labels[lag:], strict=False))
        means.append(sum(a == b for a, b in pairs) / len(pairs))
    expected = 0.0 if chance == 1 else (sum(means) / 3 - chance) / (1 - chance)
    assert autocorrelation(np.array(labels), [(2, 5)])[0] == pytest.approx(expected)


def test_lags_beyond_the_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lags \[\(1, 9\)\] of 5 samples: expected from 1 to 4"):
        autocorrelation(np.arange(5), [(1, 9)])


def test_distance_moved_of_little_orders() -> None:
    assert distance_moved(np.array([0, 10, 20, 30])) == 0
    assert distance_moved(np.array([30, 20, 10, 0])) == pytest.approx((3 + 1 + 1 + 3) / 4 / 4)


def test_topic_is_the_folder_below_the_innermost_root() -> None:
    roots = [Path("/usr"), Path("/usr/share/doc")]
    assert topic_of("docs", "/usr/share/doc/bash/README", roots) == "docs/bash"
    assert topic_of("docs", "/usr/x.md", roots) == "docs/x.md"


def test_learning_rate_rises_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 200) for step in range(201)]
    assert rates[0] == 0.1
    assert max(rates) == rates[10] == pytest.approx(1)
    assert rates[-1] == pytest.approx(0)


def test_a_model_learns_a_pattern_and_evaluate_gives_the_mean_loss() -> None:
    tokens = np.tile(np.arange(7, dtype=np.int32), 1200)
    places = np.arange(1, 1 + 8 * 1000).reshape(-1, 8)
    validation = np.tile(np.arange(8, dtype=np.int64) % 7, (4, 1))
    perplexity = train(tokens, places, validation, batch=4, vocab_size=16, seed=0)
    assert 1 <= perplexity < 2, "what comes next is always the same"
    torch.manual_seed(0)
    model = TinyModel(7, vocab_size=16, width=8, heads=2)
    sequences = torch.from_numpy(validation)
    whole = (
        model.losses(sequences[:, :-1], torch.arange(7).expand(4, -1), sequences[:, 1:])
        .mean()
        .item()
    )
    assert evaluate(model, sequences, 3) == pytest.approx(whole, rel=1e-5)


def test_a_table_has_spread_and_paired_differences() -> None:
    row = {"distance": 0.25, "documents": 1.0, "topics": 2.0, "autocorrelation": [0.5]}
    full = {seed: {**row, "perplexity": 10.0 + seed} for seed in range(2)}
    ours = {seed: {**row, "perplexity": 12.0 + 3 * seed} for seed in range(2)}
    lines = table({"ours": ours, "full": full}).splitlines()
    assert lines[0].startswith(
        "| order | distance moved | same document | same source | lags 1-7 |"
    )
    assert lines[2] == "| ours | 0.250 | 1.000 | 2.000 | 0.500 | 13.50 ± 2.12 | +3.00 ± 1.00 |"
    assert lines[3] == "| full | 0.250 | 1.000 | 2.000 | 0.500 | 10.50 ± 0.71 |  |"


def write_text(folder: Path) -> None:
    """160 little files in four packages."""
    for number in range(160):
        path = folder / f"package{number // 40}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            " ".join(f"{word:x}" for word in np.random.default_rng(number).integers(0, 4096, 20))
        )


def test_a_twentieth_of_the_documents_is_held_out_and_must_be_a_sequence(tmp_path: Path) -> None:
    write_text(tmp_path)
    wanted: dict[str, Any] = {"num_tokens": 4000, "vocab_size": 300, "folders": [tmp_path]}
    corpus = make_corpus(sequence_length=8, **wanted)
    held_out = len(corpus.documents) // 19
    assert (
        held_out * 40
        < corpus.validation.size
        <= held_out * len(corpus.tokens) / len(corpus.documents) * 1.5
    )
    with pytest.raises(
        ValueError, match=rf"{held_out} documents of \d+ tokens are held out, less than a sequence"
    ):
        make_corpus(sequence_length=4000, **wanted)


@pytest.mark.slow
def test_the_whole_table_on_a_little_text_and_going_on_where_it_stopped(tmp_path: Path) -> None:
    text = tmp_path / "text"
    folder = tmp_path / "data"
    write_text(text)
    command = [
        sys.executable,
        str(ROOT / "tools/bench/shuffle_quality/quality.py"),
        "--text",
        str(text),
    ]
    command += [
        "--tokens",
        "4000",
        "--vocab",
        "300",
        "--sequence",
        "8",
        "--page",
        "64",
        "--lanes",
        "2",
        "--cycle",
        "8",
    ]
    command += ["--batch", "4", "--seeds", "1", "--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    names = ["sequential", "megablend, page order", "full"]
    for orders in (names[1:], names):
        done = subprocess.run(
            [*command, "--orders", *orders],
            env=environment,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert sorted(row["order"] for row in rows) == sorted(names), (
        "what was there was not made again"
    )
    assert all(math.isfinite(row["perplexity"]) for row in rows)
    found = {row["order"]: row for row in rows}
    assert found["sequential"]["distance"] == 0
    assert found["sequential"]["topics"] > found["megablend, page order"]["topics"]
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[-3:]] == [
        f"| {name}" for name in names
    ]
