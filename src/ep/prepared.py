"""`PreparedStep`: a step whose arguments were checked once, to be made again and again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep.exchange import Received


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """Dispatch and combine of fixed arrays. Made by `Exchange.prepare`.

    A decoder without CUDA graphs makes each step on the same arrays, with new contents. What the
    calls then cost its host is mostly to look at the arrays again, which this does not. It may take
    turns with other calls of its exchange, and with other prepared steps.

    Attributes
    ----------
    dispatch : callable
        Does as `Exchange.dispatch`, and raises as it does, but for arguments. Collective.
    combine : callable
        Does as `Exchange.combine`, and gives `out`. Answers a dispatch of as many tokens on the
        same stream. Collective.
    out : array of bfloat16, `[T_s, H]`
        Where each result goes.
    arrays : tuple
        What must not be freed before, the stream among it.
    """

    dispatch: Callable[[], Received]
    combine: Callable[[], Any]
    out: Any
    arrays: tuple[Any, ...] = dataclasses.field(repr=False)
