"""Choices that a kernel is compiled with, beside the shape. Plain data: needs no compiler."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any, Self

from ep.errors import ArgumentError, shown


class Pdl(StrEnum):
    """Programmatic dependent launch: how early the next kernel of the stream may start."""

    OFF = "off"
    """Not before this kernel has ended."""
    LATE = "late"
    """After the wait for the peers: what starts early can never keep a peer from running."""
    EARLY = "early"
    """At once: hides the next launch. Only where each rank has a GPU of its own, since a kernel
    that is resident and idle could keep out another rank's kernel that this one waits for."""


class Fences(StrEnum):
    """Who fences at system scope between the payload and the flags, in the flag protocol."""

    THREAD = "thread"
    """Every storing thread, before the CTA barrier, and the warp that raises the flags; relies on
    no cumulativity for the payload."""
    CTA = "cta"
    """Only the warp that raises the flags, once for all CTAs; enough by the PTX memory model."""


class Warm(StrEnum):
    """What the fence-free kernels touch before they wait for the kernel ahead of them."""

    OFF = "off"
    OWN = "own"
    """What they will read on this GPU, so that its addresses are translated already."""
    PEERS = "peers"
    """That, and what they will write on the peers."""


class Boundaries(StrEnum):
    """What orders one kernel's reads and writes before a peer's, in the fence-free protocol."""

    FENCED = "fenced"
    """A fence and an acquire of the heralds, as the PTX memory model asks; no row waits for it."""
    TRUSTED = "trusted"
    """The boundaries of the kernels themselves: so GPUs behave, but no document promises it."""


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """How a kernel is made, beside its shape.

    Attributes
    ----------
    pdl : Pdl
    fences : Fences
        Of the flag protocol.
    warm : Warm
        Of the fence-free protocol; only with PDL.
    boundaries : Boundaries
        Of the fence-free protocol.
    stamps : bool
        Whether the kernels of the fence-free protocol note when they got how far.
    norm : bool
        Whether combine ends with RMSNorm; nothing to dispatch.
    """

    pdl: Pdl = Pdl.LATE
    fences: Fences = Fences.CTA
    warm: Warm = Warm.PEERS
    boundaries: Boundaries = Boundaries.FENCED
    norm: bool = False
    stamps: bool = False

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in list(kind):
                raise ArgumentError(
                    f"{name}={shown(value)} is no kernel option; it is {'|'.join(kind)}"
                )
            object.__setattr__(self, name, kind(value))
        for name in ("norm", "stamps"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={shown(getattr(self, name))}: allowed is a bool")

    @property
    def has_warm(self) -> bool:
        """Whether kernels touch anything before they wait."""
        return self.warm != Warm.OFF and self.pdl != Pdl.OFF

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read options as people write them: "fences=cta,pdl=late"; what is not named is default.

        Raises
        ------
        ArgumentError
            Naming what is not an option or not one of its values.
        """
        if not isinstance(text, str):
            raise ArgumentError(f"{shown(text)} is no text of kernel options")
        chosen: dict[str, Any] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in _KINDS or name in chosen or value not in list(_KINDS[name]):
                allowed = "; ".join(f"{key}={'|'.join(kind)}" for key, kind in _KINDS.items())
                raise ArgumentError(f"{shown(part)} is no kernel option; allowed are {allowed}")
            chosen[name] = _KINDS[name](value)
        return cls(**chosen)


_KINDS: dict[str, type[StrEnum]] = {
    "pdl": Pdl,
    "fences": Fences,
    "warm": Warm,
    "boundaries": Boundaries,
}
