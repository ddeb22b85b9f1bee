"""Access to data files: `make_storage` (in `by_scheme`) makes the object that finds and reads
them."""
