"""`python -m megablend.mirror.node`: what the first rank that needs a node process starts."""

from megablend.mirror.node.process import main

if __name__ == "__main__":
    main()
