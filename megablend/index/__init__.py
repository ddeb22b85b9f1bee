"""The index: where the tokens lie, found once by many processes and committed to a cache on a shared path."""
