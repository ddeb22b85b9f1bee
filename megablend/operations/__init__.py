"""Operations that change or check a cache and its runs: build, amend, runs, gc, verify, check; and `Session`."""
