"""Runs the command."""

from ep.doctor.cli import main

if __name__ == "__main__":
    main()
