"""Memory instructions taken apart."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.ptx.parse import Instr

_FORM = re.compile(
    r"(?P<what>ld|st|atom|red)"
    r"(?:\.(?P<order>relaxed|acquire|release|acq_rel)\.(?P<scope>cta|gpu|sys)|\.(?P<volatile>volatile))?"
    r"\.(?P<space>global|shared)(?:\.(?P<how>inc|add|exch|or))?(?:\.(?P<cache>cg|nc))?"
    r"(?:\.v(?P<vector>[24]))?\.(?P<type>b8|b16|b32|b64|b128|u32)"
)
_PLACE = re.compile(r"\[(\S+?)(?:\+(-?\d+))?\]")


@dataclasses.dataclass(frozen=True)
class Form:
    """A load, store, atomic or reduction.

    Attributes
    ----------
    what : str
        "ld", "st", "atom" or "red".
    order : str
        "weak", "nc" or as PTX has it; volatile accesses are relaxed ones at system scope.
    scope, space, how : str
    width : int
        Bits of one element.
    vector : int
    base : str
        Register that has the address, or a shared variable.
    offset : int
    """

    what: str
    order: str
    scope: str
    space: str
    how: str
    width: int
    vector: int
    base: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.width // 8 * self.vector


def form_of(instr: Instr) -> Form:
    """Take an instruction apart; raises KeyError or ValueError where it is not known."""
    found = _FORM.fullmatch(instr.op)
    if found is None:
        raise KeyError(instr.op)
    what, order, scope = found["what"], found["order"] or "weak", found["scope"] or "cta"
    if found["volatile"]:
        order, scope = "relaxed", "sys"
    if found["cache"] and (what, order) != ("ld", "weak"):
        raise ValueError(instr.op)
    if found["cache"] == "nc":
        order = "nc"
    place = instr.args[what in {"ld", "atom"}]
    at = _PLACE.fullmatch(place)
    if at is None:
        raise ValueError(place)
    return Form(
        what,
        order,
        scope,
        found["space"],
        found["how"] or "",
        int(found["type"][1:]),
        int(found["vector"] or 1),
        at[1],
        int(at[2] or 0),
    )
