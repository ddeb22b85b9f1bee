"""The tables of an index on disk: how each is written, mapped and checked."""
