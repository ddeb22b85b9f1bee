"""The config: what a user writes, validated on loading."""

from megablend.config.load import load_config
from megablend.config.model import LENGTHS, SPLITS, UNITS, Config, Source

__all__ = ["LENGTHS", "SPLITS", "UNITS", "Config", "Source", "load_config"]
