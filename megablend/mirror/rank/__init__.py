"""A mirror as used by the processes that read: training's ranks, and commands."""
