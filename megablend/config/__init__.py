"""The config: what a user writes, validated on loading."""

from megablend.config.load import load_config
from megablend.config.model import LENGTHS, SPLITS, Config
from megablend.config.source import UNITS, Source

__all__ = ["LENGTHS", "SPLITS", "UNITS", "Config", "Source", "load_config"]
