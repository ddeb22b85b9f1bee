"""The command line as `python -m megablend`, the same as the command `megablend`."""

from megablend.cli import main

if __name__ == "__main__":
    main()
