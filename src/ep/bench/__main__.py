"""Runs the command."""

from ep.bench.cli import main

if __name__ == "__main__":
    main()
