"""Finding a file's pages and counting their tokens."""
