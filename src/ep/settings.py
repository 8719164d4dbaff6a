"""Switches in the environment; README.md lists them."""

from __future__ import annotations

import os


def is_set(name: str) -> bool:
    """Whether a variable switches something on: "1" does; "", "0", "no", "off", "false" do not."""
    return os.environ.get(name, "").lower() not in ("", "0", "no", "off", "false")
