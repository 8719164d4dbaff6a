"""Runs the command."""

from ep.tune.cli import main

if __name__ == "__main__":
    main()
