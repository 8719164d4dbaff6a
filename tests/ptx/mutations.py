"""Ways to break what a kernel stores and orders, one instruction at a time."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SPLIT = "{ .reg .b64 half0, half1; .reg .b32 word0, word1, word2, word3;"
_WORDS = "{word0, word1, word2, word3}"


def _stored_as(kind: str) -> Callable[[re.Match[str]], str]:
    """One 16-byte store as several smaller ones."""

    def change(found: re.Match[str]) -> str:
        at, offset = found["at"], int(found["offset"] or 0)
        if kind == "halves":
            stores = "".join(
                f" st.relaxed.sys.global.b64 [{at}+{offset + 8 * half}], half{half};"
                for half in range(2)
            )
        else:
            order = "" if kind == "weak words" else ".relaxed.sys"
            stores = (
                " mov.b64 {word0, word1}, half0; mov.b64 {word2, word3}, half1;"
                f" st{order}.global.v4.b32 [{at}+{offset}], {_WORDS};"
            )
        return f"{_SPLIT} mov.b128 {{half0, half1}}, {found['all']};{stores} }}"

    return change


def _loaded_as(kind: str) -> Callable[[re.Match[str]], str]:
    """One 16-byte load as several smaller ones."""

    def change(found: re.Match[str]) -> str:
        at, offset, guard = found["at"], int(found["offset"] or 0), found["guard"] or ""
        order = f".{found['order']}.sys"
        if kind == "halves":
            loads = "".join(
                f" {guard}ld{order}.global.b64 half{half}, [{at}+{offset + 8 * half}];"
                for half in range(2)
            )
        else:
            order = "" if kind == "weak words" else order
            loads = (
                f" {guard}ld{order}.global.v4.b32 {_WORDS}, [{at}+{offset}];"
                f" {guard}mov.b64 half0, {{word0, word1}};"
                f" {guard}mov.b64 half1, {{word2, word3}};"
            )
        return f"{_SPLIT}{loads} {guard}mov.b128 {found['all']}, {{half0, half1}}; }}"

    return change


_AT = r"\[(?P<at>%\w+)(?:\+(?P<offset>\d+))?\]"
_PIECES = ("halves", "words", "weak words")
_Rules = list[tuple[str, str, dict[str, "str | Callable[[re.Match[str]], str]"]]]
_RULES: _Rules = [
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
    ("step read", r"ld\.relaxed\.gpu(?P<rest>\.global\.b32)", {"weak": r"ld\g<rest>"}),
    (
        "strong store",
        r"st\.relaxed\.sys(?P<rest>\.global(?!\.b128)[^;]*;)",
        {"removed": "", "weak": r"st\g<rest>", "gpu": r"st.relaxed.gpu\g<rest>"},
    ),
    (
        "state",
        r"st\.release\.sys(?P<rest>\.global[^;]*;)",
        {"removed": "", "relaxed": r"st.relaxed.sys\g<rest>", "gpu": r"st.release.gpu\g<rest>"},
    ),
    (
        "chunk store",
        r"st\.relaxed\.sys\.global\.b128 " + _AT + r", (?P<all>\w+);",
        {
            "removed": "",
            "gpu": lambda found: found[0].replace(".sys", ".gpu"),
            **{kind: _stored_as(kind) for kind in _PIECES},
        },
    ),
    (
        "chunk load",
        r"(?P<guard>@\w+ )?ld\.(?P<order>relaxed)\.sys\.global\.b128 (?P<all>\w+), " + _AT + ";",
        {
            "gpu": lambda found: found[0].replace(".sys", ".gpu"),
            **{kind: _loaded_as(kind) for kind in _PIECES},
        },
    ),
    (
        "acquired chunk",
        r"(?P<guard>@\w+ )?ld\.(?P<order>acquire)\.sys\.global\.b128 (?P<all>\w+), " + _AT + ";",
        {kind: _loaded_as(kind) for kind in _PIECES},
    ),
    # The constant is that of the fence-free protocol's chunks.
    (
        "seal",
        r"selp\.b32\s+(?P<to>%r\d+), 2147450879, (?P<of>%r\d+), %p\d+;",
        {"removed": r"mov.b32 \g<to>, \g<of>;"},
    ),
    ("bits", r"atom\.relaxed\.gpu(?P<rest>\.global\.or)", {"cta": r"atom.relaxed.cta\g<rest>"}),
    ("store", r"st\.global[^;]*;", {"removed": ""}),
    ("wait", r"griddepcontrol\.wait;", {"removed": ""}),
    ("trigger", r"griddepcontrol\.launch_dependents;", {"removed": ""}),
    (
        "trigger after the wait",
        r"(?P<wait>griddepcontrol\.wait;(?s:.*?))(?P<trigger>griddepcontrol\.launch_dependents;)",
        {"moved before": r"\g<trigger> \g<wait>"},
    ),
]
FREE_RULES: _Rules = [
    *_RULES,
    ("shared store", r"st\.shared[^;]*;", {"removed": ""}),
    (
        "stop",
        r"st\.relaxed\.gpu(?P<rest>\.global[^;]*;)",
        {"removed": "", "weak": r"st\g<rest>"},
    ),
    (
        "claim",
        r"atom\.relaxed\.gpu\.global\.exch\.b32 (?P<to>%r\d+), [^;]*;",
        {"removed": r"mov.b32 \g<to>, 0;"},
    ),
    (
        "bits",
        r"atom\.relaxed\.gpu\.global\.or\.b32 (?P<to>%r\d+), [^;]*;",
        {"removed": r"mov.b32 \g<to>, 0;"},
    ),
]
"""Those that are for the kernels of the fence-free protocol, besides all others."""
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


def mutants(ptx: str, places: set[str] | None = None, rules: _Rules = _RULES) -> Iterator[Mutant]:
    """All single changes, or those at `places` only."""
    for place, pattern, changes in rules:
        if places is not None and place not in places:
            continue
        for number, found in enumerate(re.finditer(pattern, ptx)):
            for change, to in changes.items():
                text = found.expand(to) if isinstance(to, str) else to(found)
                if text != found[0]:
                    changed = ptx[: found.start()] + text + ptx[found.end() :]
                    yield Mutant(f"{place} {number} {change}", changed)
