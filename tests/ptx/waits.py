"""Worlds in which a wait expires."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

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
    text, looks = re.subn(r"(setp\.lt\.u32\s+%p\d+, %r\d+, )1023;", rf"\g<1>{POLLS - 1};", text)
    text, gathers = re.subn(r"(add\.s64\s+%rd\d+, %rd\d+, )2000000;", rf"\g<1>{GATHER_NS};", text)
    assert looks >= gathers == 1
    return text


class Lame(World):
    """A world in which some ranks' dispatch has no CTAs that send, or none that receive.

    Of the threads that wait for one rank, only the receivers then wait, or only the herald.
    """

    no_senders: tuple[int, ...] = ()
    no_receivers: tuple[int, ...] = ()
    _enqueued = 0

    def stale_rows(self, rank: int) -> str | None:
        """Tell if what came of no sender is anything but NaN in the first rows that waited."""
        self.machine.run()
        rows = self._rows(self.memory.peek(self.own[rank], self.layout.total_bytes))
        for src_rank in self.no_senders:
            row = src_rank * self.layout.stride
            for name in ("x", "scales"):
                if not np.isnan(getattr(rows, name)[row].astype(np.float32)).all():
                    return f"{name} of rank {src_rank} is no NaN"
        return None

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


def news_after(world: World, rank: int) -> str | None:
    """Run a further step on a rank that has given up; tells what it sent or gave, if anything.

    `world` has a plan without experts.
    """
    world.machine.run()
    size, step = world.layout.total_bytes, world.case.step(7, min(4, world.config.max_tokens))
    before = [world.memory.peek(own, size).copy() for own in world.own]
    at = world._enqueue(step, rank)
    world.machine.run()
    after = [world.memory.peek(own, size) for own in world.own]
    for peer in range(world.config.ranks):
        if peer != rank and (after[peer] != before[peer]).any():
            return f"rank {peer} was sent something"
    size = 2 * step.counts[rank] * world.config.hidden
    if not np.isnan(world.memory.peek(at, size).view(ml_dtypes.bfloat16)).all():
        return "a result is not NaN"
    rows = world._rows(after[rank])
    is_empty = (rows.source == -1).all() and (rows.ids == world.config.empty_id(rank)).all()
    if not is_empty or rows.weights.view(np.uint32).any() or rows.scales.view(np.uint8).any():
        return "a row is not empty"
    steps = [world._field(array[rank], "control")[:2, :2].tolist() for array in (before, after)]
    return None if steps[0] == steps[1] else "it went on to a further step"
