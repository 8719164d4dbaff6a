"""Switches in the environment; README.md lists them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLES = (
    "EP_BENCH_TIMEOUT",
    "EP_CACHE_DIR",
    "EP_CHECK",
    "EP_COMMIT",
    "EP_MPI",
    "EP_NP",
    "EP_PROOFS",
    "EP_PYTHON",
    "EP_SHARE_GPUS",
    "EP_SHM_DIR",
    "EP_TEST_OPENMPI",
    "EP_TUNING",
    "EP_UNTESTED_VERSIONS",
    "EP_VENV",
)
"""Every variable that something here reads; `ep.doctor` takes others for typing errors."""


def is_set(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a variable switches something on: "1" does; "", "0", "no", "off", "false" do not."""
    return environ.get(name, "").lower() not in ("", "0", "no", "off", "false")
