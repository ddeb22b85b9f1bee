"""Where files lie. `storage_for` is the one way to get a Storage."""
