"""How the samples of several sources are interleaved: one file each, listed in `registry`."""
