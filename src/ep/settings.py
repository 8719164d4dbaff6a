"""Switches in the environment; README.md lists them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ON = ("1", "yes", "on", "true")
OFF = ("", "0", "no", "off", "false")
VARIABLES = (
    "EP_BENCH_TIMEOUT",
    "EP_BOOTSTRAP",
    "EP_CACHE_DIR",
    "EP_CHECK",
    "EP_COMMIT",
    "EP_IMAGE",
    "EP_LOCAL_RANK",
    "EP_MPI",
    "EP_MUNGE_SOCKET",
    "EP_NP",
    "EP_PROOFS",
    "EP_PYTHON",
    "EP_RANK",
    "EP_RANKS",
    "EP_RENDEZVOUS",
    "EP_SECRET",
    "EP_SHARE_GPUS",
    "EP_SHM_DIR",
    "EP_TEST_OPENMPI",
    "EP_TUNING",
    "EP_UNTESTED_VERSIONS",
    "EP_VENV",
)
"""Every variable that something here reads; `ep.doctor` takes others for typing errors."""
SECRETS = ("EP_SECRET",)
"""Variables whose values are never shown."""
OF_A_RANK = ("EP_LOCAL_RANK", "EP_RANK")
"""Variables that differ between ranks."""


def is_set(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable switches something on: 1, yes, on, true do; 0, no, off, false, "" do not.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    text = environ.get(name, "")
    for words, value in ((_ON, True), (OFF, False)):
        if text.lower() in words:
            return value
    raise ConfigError(name, text, "1 or 0")


def choice(name: str, allowed: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Give the value of a variable that is one of `allowed`; the first if it is not set.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    text = environ.get(name, "").lower() or allowed[0]
    if text not in allowed:
        raise ConfigError(name, text, f"one of {', '.join(allowed)}")
    return text
