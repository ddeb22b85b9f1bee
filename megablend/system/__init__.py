"""The operating system: files that are complete or absent, locks, safe folders, its errors, JSON with limits."""
