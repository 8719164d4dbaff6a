"""What an export is of, and the kernels in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ep.errors import ArgumentError
from ep.kernels.compile import ARCHES, Image, Kind, get_image, sources_digest
from ep.kernels.options import KernelOptions, Pdl
from ep.layout import EpLayout
from ep.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep.config import EpConfig

ABI_VERSION = 1
"""Of the functions and structs of `ep.h`: raised when something that was there changes."""


class Part(NamedTuple):
    """One kernel of a library; `place` is that among those of an architecture."""

    place: int
    kind: Kind
    norm: bool


PARTS = (
    Part(0, Kind.DISPATCH, norm=False),
    Part(1, Kind.COMBINE, norm=False),
    Part(2, Kind.COMBINE, norm=True),
)


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """What a library serves.

    Attributes
    ----------
    source : str
        Name of the shape, for people.
    config : EpConfig
        Of the fence-free protocol.
    arches : tuple of str
        Of `ep.kernels.compile.ARCHES`.
    pdls : tuple of Pdl
        Early: for ranks that have a GPU each. Late: for those that share one.

    Raises
    ------
    ArgumentError
    """

    source: str
    config: EpConfig
    arches: tuple[str, ...] = ARCHES
    pdls: tuple[Pdl, ...] = (Pdl.EARLY, Pdl.LATE)

    def __post_init__(self) -> None:
        wrong = [arch for arch in self.arches if arch not in ARCHES]
        if wrong or not self.arches or len(set(self.arches)) < len(self.arches):
            raise ArgumentError(
                f"architectures are {', '.join(self.arches) or 'none'}; allowed are "
                f"{', '.join(ARCHES)}, each once"
            )

    @property
    def layout(self) -> EpLayout:
        """Of each rank's buffer."""
        return EpLayout(self.config)

    @property
    def facts(self) -> dict[str, Any]:
        """What the library says of itself."""
        shape = dataclasses.asdict(self.config)
        names = ("ranks", "hidden", "experts", "top_k", "max_tokens")
        return {
            "name": self.source,
            **{name: shape[name] for name in names},
            "rows": self.layout.rows,
            "stride": self.layout.stride,
            "buffer_bytes": self.layout.total_bytes,
            "version": __version__,
            "abi_version": ABI_VERSION,
            "arches": list(self.arches),
            "pdls": list(self.pdls),
        }

    @property
    def config_id(self) -> str:
        """Digest of all that decides what a buffer holds and what kernels make of it."""
        config = dataclasses.asdict(self.config)
        # Arguments of the kernels, not part of them.
        del config["timeout_s"], config["grace_s"]
        facts = {
            "config": config,
            "versions": [ABI_VERSION, __version__],
            "layout": self.layout.table(),
            "sources": sources_digest(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def kernels(self) -> list[tuple[str, Pdl, Part]]:
        """Architecture, how early the next kernel may start, and part, of every kernel."""
        return [(arch, pdl, part) for arch in self.arches for pdl in self.pdls for part in PARTS]

    def images(self, tell: Callable[[int, int], None]) -> list[Image]:
        """Compile all of `kernels`, or read them from the cache.

        Parameters
        ----------
        tell : callable
            Told how many are done, of how many.

        Raises
        ------
        EpError
            If one is not in the cache, and there is no compiler.
        """
        images = []
        wanted = self.kernels()
        for done, (arch, pdl, part) in enumerate(wanted):
            tell(done, len(wanted))
            options = KernelOptions(pdl=pdl, norm=part.norm)
            images.append(get_image(part.kind, self.layout, options, arch))
        tell(len(wanted), len(wanted))
        return images
