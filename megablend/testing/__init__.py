"""Contract test suites for extensions in other packages. Subclass one in a pytest file and set its
class attributes."""
