"""Make samples from blocks, as torch tensors."""

from megablend.reader.dataset import Dataset
from megablend.reader.loader import Loader
from megablend.reader.sampler import PretrainingSampler

__all__ = ["Dataset", "Loader", "PretrainingSampler"]
