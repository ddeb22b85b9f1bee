"""The parts of a sample index as one array."""

from typing import Any

import numpy as np

from megablend.megatron.exact.samples import sample_rows


def sample_index(*args: Any, dtype: Any = np.int32, **options: Any) -> Any:
    """All rows, [samples + 1, 2]."""
    return np.concatenate(list(sample_rows(*args, dtype=dtype, **options)))
