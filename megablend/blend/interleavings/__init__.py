"""The interleavings of the samples of several sources: one file each, listed in `registry`."""
