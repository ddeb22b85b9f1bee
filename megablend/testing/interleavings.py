"""The contract of every interleaving: exact totals, each ordinal once, and counts that agree with a
walk over all samples.

class TestMyInterleaving(InterleavingContract):
    kind = InterleavingKind(plan_my_stage)
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import numpy as np

from megablend.blend.interleavings.base import StageRequest
from megablend.blend.interleavings.registry import InterleavingKind
from megablend.testing.expect import raises


class InterleavingContract:
    """The tests of an interleaving. Subclass this class, and set `kind`."""

    kind: InterleavingKind
    """The interleaving under test."""
    examples = 30
    """The number of random stages per test."""

    def draw_stages(self, name: str) -> Iterator[tuple[random.Random, StageRequest]]:
        """Yield pairs of a random generator and a random stage. Stages have one or several sources,
        some without samples, and are at the start of a run or later."""
        for number in range(self.examples):
            rng = random.Random(f"{name} {number}")
            size = rng.randrange(1, 7)
            totals = np.array([rng.choice([0, 1, rng.randrange(60)]) for _ in range(size)])
            totals[rng.randrange(size)] += 1
            first = np.array([rng.choice([0, rng.randrange(100)]) for _ in range(size)])
            epochs = np.array([rng.randrange(1, 400) for _ in range(size)])
            yield (
                rng,
                StageRequest(
                    totals=totals,
                    first_sample=int(first.sum()),
                    first_tokens=first,
                    seed=rng.randrange(2**63),
                    lanes=rng.choice([1, 2, 3, 4, 8, 64]),
                    shuffle_window=rng.randrange(1, 20),
                    cycles=np.array([rng.randrange(1, 5) for _ in range(size)]),
                    epoch_tokens=rng.choice([None, epochs]),
                    sample_tokens=rng.randrange(1, 9),
                ),
            )

    def test_totals_are_exact_and_every_ordinal_occurs_once(self) -> None:
        """Each source has its exact total of samples, and each of its ordinals, counted from the
        start of the stage, occurs once."""
        for _, stage in self.draw_stages("once"):
            plan = self.kind.plan(stage)
            assert (plan.num_samples, plan.num_sources) == (stage.num_samples, len(stage.totals))
            sources, ordinals = plan.locate_many(np.arange(plan.num_samples))
            assert [sources.dtype, ordinals.dtype] == [np.dtype(np.int32), np.dtype(np.int64)]
            for source, total in enumerate(stage.totals):
                assert np.array_equal(np.sort(ordinals[sources == source]), np.arange(total)), stage

    def test_one_many_and_any_sequence_of_samples_agree(self) -> None:
        """The result of a call does not depend on earlier calls, nor on the samples that are
        located in the same call."""
        for rng, stage in self.draw_stages("many"):
            plan = self.kind.plan(stage)
            walk = [plan.locate(k) for k in range(plan.num_samples)]
            ks = np.array([rng.randrange(plan.num_samples) for _ in range(30)])
            located = zip(
                *(column.tolist() for column in self.kind.plan(stage).locate_many(ks)), strict=True
            )
            assert list(located) == [walk[k] for k in ks], stage
            none = plan.locate_many(np.zeros(0, np.int64))
            assert [len(column) for column in none] == [0, 0]

    def test_counts_agree_with_a_walk(self) -> None:
        """`counts` of every prefix agree with a walk over all samples."""
        for _, stage in self.draw_stages("counts"):
            plan = self.kind.plan(stage)
            seen = [0] * len(stage.totals)
            assert plan.counts(0).tolist() == seen
            for k in range(plan.num_samples):
                seen[plan.locate(k)[0]] += 1
                assert plan.counts(k + 1).tolist() == seen, (stage, k)

    def test_nth_samples_agree_with_a_walk(self) -> None:
        """`nth_sample` returns the samples of a source in the order in which they occur."""
        for _, stage in self.draw_stages("nth"):
            plan = self.kind.plan(stage)
            sources, _ = plan.locate_many(np.arange(plan.num_samples))
            for source, total in enumerate(stage.totals.tolist()):
                samples = [plan.nth_sample(source, n) for n in range(1, total + 1)]
                assert samples == np.flatnonzero(sources == source).tolist(), (stage, source)

    def test_samples_of_is_the_inverse(self) -> None:
        """`samples_of` returns each sample for the source and ordinal that `locate_many` gives, in
        any sequence."""
        for rng, stage in self.draw_stages("inverse"):
            plan = self.kind.plan(stage)
            ks = np.array(rng.sample(range(plan.num_samples), plan.num_samples))
            assert plan.samples_of(*plan.locate_many(ks)).tolist() == ks.tolist(), stage
            for source, total in enumerate(stage.totals):
                for ordinal in (-1, int(total)):
                    sample_of_source = np.array([source], np.int32), np.array([ordinal])
                    assert raises(IndexError, plan.samples_of, *sample_of_source), (source, ordinal)

    def test_samples_that_do_not_exist_are_refused(self) -> None:
        """Numbers out of range raise an IndexError; numbers that are not integers raise a
        TypeError."""
        for _, stage in self.draw_stages("refused"):
            plan = self.kind.plan(stage)
            for k in (-1, plan.num_samples, 10**18, 10**30):
                assert raises(IndexError, plan.locate, k), k
                assert raises(IndexError, plan.locate_many, [0, k]), k
            for n in (-1, plan.num_samples + 1):
                assert raises(IndexError, plan.counts, n), n
            assert raises(TypeError, plan.locate_many, [0.5])

    def test_pickled(self) -> None:
        """A pickled copy gives the same result."""
        for _, stage in self.draw_stages("pickled"):
            plan = self.kind.plan(stage)
            ks = np.arange(stage.num_samples)
            copy = pickle.loads(pickle.dumps(plan))
            assert np.array_equal(np.stack(plan.locate_many(ks)), np.stack(copy.locate_many(ks)))
