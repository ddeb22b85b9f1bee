"""What changes or checks a cache and its runs: build, amend, runs, gc, verify, check; and `Session`."""
