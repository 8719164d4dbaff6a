"""Runs the command."""

from ep.export.cli import main

if __name__ == "__main__":
    main()
