"""Ways to break what a kernel stores and orders, one instruction at a time."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_RULES: list[tuple[str, str, dict[str, str]]] = [
    # name of the place, pattern, what it becomes by name of the change
    ("fence", r"fence\.acq_rel\.sys;", {"removed": "", "gpu": "fence.acq_rel.gpu;"}),
    ("barrier", r"bar\.sync\s+0;", {"removed": ""}),
    (
        "vote barrier",
        r"bar\.red\.and\.pred\s+(?P<to>%p\d+), 0, (?P<of>%p\d+);",
        {"removed": r"mov.pred \g<to>, \g<of>;"},
    ),
    ("warp barrier", r"bar\.warp\.sync\s+-1;", {"removed": ""}),
    (
        "arrival",
        r"atom\.(?P<order>acq_rel|acquire)\.gpu(?P<rest>\.global\.inc)",
        {
            "relaxed": r"atom.relaxed.gpu\g<rest>",
            "acquire": r"atom.acquire.gpu\g<rest>",
            "release": r"atom.release.gpu\g<rest>",
            "cta": r"atom.\g<order>.cta\g<rest>",
        },
    ),
    (
        "departure",
        r"atom\.relaxed\.gpu(?P<rest>\.global\.inc)",
        {"cta": r"atom.relaxed.cta\g<rest>"},
    ),
    ("claim", r"atom\.relaxed\.gpu(?P<rest>\.global\.exch)", {"cta": r"atom.relaxed.cta\g<rest>"}),
    (
        "step",
        r"red\.relaxed\.gpu(?P<rest>\.global\.add[^;]*;)",
        {"removed": "", "cta": r"red.relaxed.cta\g<rest>"},
    ),
    (
        "poll",
        r"ld\.acquire\.sys(?P<rest>\.global)",
        {
            "relaxed": r"ld.relaxed.sys\g<rest>",
            "weak": r"ld\g<rest>",
            "gpu": r"ld.acquire.gpu\g<rest>",
        },
    ),
    (
        "slot",
        r"ld\.relaxed\.sys(?P<rest>\.global\.v4)",
        {"weak": r"ld\g<rest>", "gpu": r"ld.relaxed.gpu\g<rest>"},
    ),
    ("step read", r"ld\.relaxed\.gpu(?P<rest>\.global)", {"weak": r"ld\g<rest>"}),
    (
        "strong store",
        r"st\.relaxed\.sys(?P<rest>\.global[^;]*;)",
        {"removed": "", "weak": r"st\g<rest>", "gpu": r"st.relaxed.gpu\g<rest>"},
    ),
    (
        "state",
        r"st\.release\.sys(?P<rest>\.global[^;]*;)",
        {"removed": "", "relaxed": r"st.relaxed.sys\g<rest>", "gpu": r"st.release.gpu\g<rest>"},
    ),
    ("store", r"st\.global[^;]*;", {"removed": ""}),
    ("wait", r"griddepcontrol\.wait;", {"removed": ""}),
    ("trigger", r"griddepcontrol\.launch_dependents;", {"removed": ""}),
]
ORDERING = {"fence", "barrier", "vote barrier", "warp barrier", "arrival", "poll"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A kernel with one change.

    Attributes
    ----------
    name : str
        "place number change": the first fence without scope is "fence 0 gpu".
    ptx : str
    """

    name: str
    ptx: str


def mutants(ptx: str, places: set[str] | None = None) -> Iterator[Mutant]:
    """All single changes, or those at `places` only."""
    for place, pattern, changes in _RULES:
        if places is not None and place not in places:
            continue
        for number, found in enumerate(re.finditer(pattern, ptx)):
            for change, to in changes.items():
                text = found.expand(to)
                if text != found[0]:
                    changed = ptx[: found.start()] + text + ptx[found.end() :]
                    yield Mutant(f"{place} {number} {change}", changed)
