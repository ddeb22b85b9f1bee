"""How many samples training will ask each split for, by the flags of Megatron's training script.

Source: megatron.training.training.get_train_valid_test_num_samples, update_train_iters. Steps of batch-size ramps
and phases are not reckoned with: where these decide, the numbers are given directly.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megablend.errors import ConfigError
from megablend.megatron.request.request import SPLITS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFlags:
    """The flags that sizes follow from, named as Megatron names them, and sizes given directly."""

    train_samples: int | None = None
    train_iters: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: tuple[str, ...] = ()
    """Size, increment and samples of a ramp of the batch."""
    eval_interval: int | None = None
    eval_iters: int = 100
    full_validation: bool = False
    valid_samples: int | None = None
    test_samples: int | None = None

    def sizes(self, used: Collection[int]) -> tuple[int | None, ...]:
        """Samples of each split; 0 for splits that are not in `used`, None for a valid split of one epoch.

        Raises: ConfigError where a flag is missing that the size of a used split follows from, or two contradict.
        """
        if self.train_samples and self.train_iters:
            raise ConfigError("--train-samples and --train-iters are both given; Megatron takes one of them")
        if self.full_validation and self.valid_samples is not None:
            raise ConfigError("--full-validation takes whole epochs; leave out --valid-samples")
        makers = (self._train, self._valid, self._test)
        return tuple(make() if split in used else 0 for split, make in zip(range(len(SPLITS)), makers, strict=True))

    def _train(self) -> int:
        if self.train_samples:
            return self.train_samples
        return self._iterations("train", "--train-samples") * self._batch("train", "--train-samples")

    def _valid(self) -> int | None:
        if self.full_validation:
            return None
        if self.valid_samples is not None:
            return self.valid_samples
        if not self.eval_interval:
            raise ConfigError("valid: its size needs --eval-interval, or set it directly by --valid-samples")
        rounds = self._iterations("valid", "--valid-samples") // self.eval_interval + 1
        return rounds * self.eval_iters * self._batch("valid", "--valid-samples")

    def _test(self) -> int:
        if self.test_samples is not None:
            return self.test_samples
        return self.eval_iters * self._batch("test", "--test-samples")

    def _iterations(self, split: str, outright: str) -> int:
        if self.train_iters:
            return self.train_iters
        if not self.train_samples:
            raise ConfigError(
                f"{split}: its size needs --train-samples or --train-iters, or set it directly by {outright}"
            )
        if self.rampup_batch_size:  # more steps, by Megatron's own rounding of each
            raise ConfigError(
                f"{split}: its size with --rampup-batch-size is not reckoned; set it directly by {outright}"
            )
        return self.train_samples // self._batch(split, outright)

    def _batch(self, split: str, outright: str) -> int:
        if not self.global_batch_size:
            raise ConfigError(f"{split}: its size needs --global-batch-size, or set it directly by {outright}")
        return self.global_batch_size
