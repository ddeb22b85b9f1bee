"""The side of a mirror in the processes that read: training's ranks, and commands."""
