"""`python -m megablend` is `megablend`."""

from megablend.cli import main

if __name__ == "__main__":
    main()
