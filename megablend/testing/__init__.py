"""Contract suites for what other packages add. Subclass one in a test file for pytest, and set what it asks for."""
