"""Run the command line by `python -m megablend`, like `megablend`."""

from megablend.cli import main

if __name__ == "__main__":
    main()
