"""Compare what a rank has with what the oracle says, and say precisely what is wrong."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ep.bench.bridge import HostBridge, received_rows
from ep.bench.cases import EPS
from ep.layout import EMPTY_SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from ep.bench.bridge import Bridge
    from ep.bench.cases import Step
    from ep.exchange import Exchange, Received
    from ep.reference import BFloat16Array, Rows

    Array = npt.NDArray[np.generic]

_FIELDS = ("source", "ids", "weights", "scales", "x")
"""In this order: a misplaced row is told as such, not by its first wrong byte."""
_LOOSE_FIELDS = ("scales", "x")
"""Of an empty row these need only be finite."""


class Where(NamedTuple):
    """On which rank and after what something was compared."""

    rank: int
    step: int
    phase: Literal["dispatch", "combine", "timed combine"]


@dataclasses.dataclass(frozen=True)
class Complaint:
    """The first difference found.

    Attributes
    ----------
    where : Where
    field : str
        A field of `Received`, or "result".
    index : tuple of int
        First coordinate that differs; empty where the arrays' shapes or types do.
    place : str
        That coordinate in words.
    got, want : str
    num_different, num_compared : int
        Elements of the field.
    """

    where: Where
    field: str
    index: tuple[int, ...]
    place: str
    got: str
    want: str
    num_different: int
    num_compared: int

    def __str__(self) -> str:
        rank, step, phase = self.where
        element = f"{self.field}[{', '.join(map(str, self.index))}]" if self.index else self.field
        return (
            f"rank {rank}, after {phase} of step {step}: {element} ({self.place}) is {self.got}, "
            f"want {self.want}; {self.num_different} of {self.num_compared} elements differ"
        )


def check_rows(
    received: Received | Rows, want: Rows, where: Where, stride: int
) -> Complaint | None:
    """Compare receive rows, all of them, bit for bit; x and scales of empty rows need be finite.

    Parameters
    ----------
    received : Received or Rows
        NumPy arrays.
    want : Rows
    where : Where
        For the complaint.
    stride : int
        Rows a source has.

    Returns
    -------
    Complaint or None
    """
    empty = want.source == EMPTY_SOURCE
    for field in _FIELDS:
        got, right = np.asarray(getattr(received, field)), getattr(want, field)
        complaint = _compare_kinds(field, got, right, where)
        if complaint is not None:
            return complaint
        different = _bits(got) != _bits(right)
        if field in _LOOSE_FIELDS:
            different[empty] = np.isnan(got[empty])
        if different.any():
            index = _first(different)
            src, token = divmod(index[0], stride)
            must_be_empty = bool(empty[index[0]])
            state = "a row that must be empty" if must_be_empty else "a live row"
            loose = must_be_empty and field in _LOOSE_FIELDS
            return Complaint(
                where,
                field,
                index,
                f"token {token} of rank {src}, {state}",
                _show(field, got[index]),
                "a finite value" if loose else _show(field, right[index]),
                int(different.sum()),
                different.size,
            )
    return None


def check_result(got: BFloat16Array, want: BFloat16Array, where: Where) -> Complaint | None:
    """Compare a result of combine `[T, H]`: bit for bit, but a NaN is a NaN.

    Returns
    -------
    Complaint or None
    """
    got = np.asarray(got)
    complaint = _compare_kinds("result", got, want, where)
    if complaint is not None:
        return complaint
    different = (_bits(got) != _bits(want)) & ~(np.isnan(got) & np.isnan(want))
    if not different.any():
        return None
    index = _first(different)
    return Complaint(
        where,
        "result",
        index,
        f"token {index[0]}",
        _show("result", got[index]),
        _show("result", want[index]),
        int(different.sum()),
        different.size,
    )


def run_checked_step(
    exchange: Exchange, step: Step, bridge: Bridge | None = None, *, prepared: bool = False
) -> Complaint | None:
    """Run one step and compare rows, result and emptied rows with the oracle. Collective.

    `bridge` is that of the exchange; the host backend needs none. `prepared`: by a `PreparedStep`.

    After it the ranks must meet (by an allgather of the complaints, say) before the next dispatch,
    which could otherwise reach rows that are still being compared here.

    Returns
    -------
    Complaint or None
        Of this rank. The step was finished in any case.
    """
    bridge = bridge or HostBridge()
    rank, stride = exchange.world.rank, exchange.layout.stride
    inputs = step.inputs(rank)
    rows, result = step.expected_rows(rank), step.expected_result(rank)
    # Made from the oracle's words, so that a wrong word received is told of but once.
    partials = bridge.put(step.partials(rank, rows.source))
    x, ids, weights = (bridge.put(array) for array in inputs)
    norm_weight = step.case.norm_weight
    gains = None if norm_weight is None else bridge.put(norm_weight)
    # No memory is taken from here on: that can wait for the kernel of another rank.
    out = bridge.put(np.full_like(result, np.nan))
    # The oracle may take longer than a wait inside of a step is allowed to.
    exchange.world.barrier("making a step's data")
    send: Callable[[], Any] = partial(exchange.dispatch, x, ids, weights, bridge.stream)
    bring: Callable[[], Any] = partial(
        exchange.combine, partials, ids, gains, EPS, out, bridge.stream
    )
    if prepared:
        again = exchange.prepare(x, ids, weights, partials, gains, EPS, out, bridge.stream)
        send, bring = again.dispatch, again.combine
    received = send()
    live = received_rows(bridge, received)
    complaint = check_rows(live, rows, Where(rank, step.number, "dispatch"), stride)
    bring()
    # A combine ends once this rank's own tokens are home. Ranks of one process must not copy or
    # free memory before each has enqueued what another one's kernel waits for.
    exchange.world.barrier("combining a checked step")
    got = bridge.get(out)
    after = Where(rank, step.number, "combine")
    return (
        complaint
        or check_result(got, result, after)
        or check_rows(received_rows(bridge, received), step.empty_rows(rank), after, stride)
    )


def _compare_kinds(field: str, got: Array, want: Array, where: Where) -> Complaint | None:
    if got.shape == want.shape and got.dtype == want.dtype:
        return None
    kinds = tuple(f"{array.dtype.name} {list(array.shape)}" for array in (got, want))
    return Complaint(where, field, (), "the whole array", kinds[0], kinds[1], want.size, want.size)


def _bits(array: Array) -> npt.NDArray[np.unsignedinteger[Any]]:
    # A view of the same width works on any strides; NaN and -0 then compare by their bits.
    return array.view(f"u{array.dtype.itemsize}")


def _first(different: npt.NDArray[np.bool_]) -> tuple[int, ...]:
    flat = int(np.argmax(different))
    return tuple(int(axis) for axis in np.unravel_index(flat, different.shape))


def _show(field: str, value: Any) -> str:
    if field == "source":
        if value == EMPTY_SOURCE:
            return "-1"
        return f"{int(value)} (token {int(value) & 0xFFFF} of rank {int(value) >> 16 & 0xFFFF})"
    if field == "ids":
        return str(int(value))
    bits = int(np.asarray(value).view(f"u{value.dtype.itemsize}"))
    return f"{float(value):.9g} (0x{bits:0{2 * value.dtype.itemsize}x})"
