"""The tables of an index on disk: how they are written, mapped and checked."""
