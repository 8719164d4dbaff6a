"""Worlds in which a wait expires."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from ep.kernels.compile import Kind
from tests.ptx.world import World, image

if TYPE_CHECKING:
    from ep.bench.cases import Case, Step
    from ep.kernels.options import KernelOptions

POLLS = 16
"""Polls between two looks at the clock, as kernels of `impatient` texts have it."""
GATHER_NS = 60_000_000
"""How long they gather what other threads miss: longer than the machine halts a warp."""
TICK_NS = 100_000
TIMEOUT_NS = 100_000_000


def impatient(
    case: Case, options: KernelOptions, ptx: dict[Kind, str] | None = None
) -> dict[Kind, str]:
    """Texts of both kernels for short runs: they look at the clock often, and then take time."""
    options = dataclasses.replace(options, norm=case.norm)
    texts = {kind: image(kind, case.config, options).ptx for kind in (Kind.DISPATCH, Kind.COMBINE)}
    return {kind: _hurry(text) for kind, text in (texts | (ptx or {})).items()}


def _hurry(text: str) -> str:
    text, looks = re.subn(r"(and\.b32\s+%r\d+, %r\d+, )1023;", rf"\g<1>{POLLS - 1};", text)
    text, gathers = re.subn(r"(add\.s64\s+%rd\d+, %rd\d+, )2000000;", rf"\g<1>{GATHER_NS};", text)
    assert looks == gathers > 0
    return text


class Lame(World):
    """A world in which some ranks' dispatch has no CTAs that send, or none that receive.

    Of the threads that wait for one rank, only the receivers then wait, or only the herald.
    """

    no_senders: tuple[int, ...] = ()
    no_receivers: tuple[int, ...] = ()
    _enqueued = 0

    def _enqueue(self, step: Step, rank: int, *, only_dispatch: bool = False) -> int:
        self._enqueued = rank
        return super()._enqueue(step, rank, only_dispatch=only_dispatch)

    def _grid(self, kind: Kind, num_tokens: int) -> tuple[tuple[int, ...], int]:
        (senders, stamps), ctas = super()._grid(kind, num_tokens)
        if kind is Kind.DISPATCH and self._enqueued in self.no_senders:
            return (0, stamps), ctas - senders
        if kind is Kind.DISPATCH and self._enqueued in self.no_receivers:
            return (senders, stamps), 1 + senders
        return (senders, stamps), ctas
