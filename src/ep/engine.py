"""What a backend is made of, as `Exchange` sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep.buffers import EpBuffers


class Engine(Protocol):
    """What a backend does. Making one is collective; it allocates the buffers, or is given them.

    Whatever `dispatch` and `combine` raise stops the exchange: arguments are checked before.
    """

    @property
    def buffers(self) -> EpBuffers:
        """Where the tokens arrive."""
        ...

    def array(self, name: str, array: Any, dtype: Any, shape: Any, *, out: bool = False) -> Any:
        """Check one argument and give it as `dispatch` and `combine` take it."""
        ...

    def stream(self, stream: Any) -> Any:
        """Check a stream and give it as `dispatch` and `combine` take it."""
        ...

    def resume(self, stream: Any) -> None:
        """Check what `stream` has given once more: what may have changed."""
        ...

    def empty(self, shape: tuple[int, int], stream: Any) -> Any:
        """Make a BF16 array for a result."""
        ...

    def values(self, array: Any, stream: Any) -> Any:
        """Copy an argument to NumPy, to look at its values; None where that cannot be now."""
        ...

    def dispatch(self, x: Any, ids: Any, weights: Any, stream: Any) -> None:
        """Send this rank's tokens and wait for the other ranks' tokens."""
        ...

    def combine(
        self, partials: Any, ids: Any, norm_weight: Any, eps: float, out: Any, stream: Any
    ) -> None:
        """Send partials home, empty the rows, sum what came back into `out`."""
        ...

    def prepare_dispatch(self, x: Any, ids: Any, weights: Any, stream: Any) -> Callable[[], None]:
        """Give what does `dispatch` with these, again and again. It keeps no array alive."""
        ...

    def prepare_combine(
        self, partials: Any, ids: Any, norm_weight: Any, eps: float, out: Any, stream: Any
    ) -> Callable[[], None]:
        """The same for `combine`."""
        ...

    def poll(self) -> None:
        """Raise `EpTimeout` if a wait that nobody has heard of yet has expired."""
        ...

    @property
    def step(self) -> int:
        """The last step that this rank has begun. Only when its own work has ended."""
        ...

    def rearm(self, step: int, excluded: frozenset[int]) -> None:
        """Make all as it is between steps, the last of which was `step`; skip `excluded` later.

        Local: every rank that is not excluded has stopped, and none goes on until all have done it.
        """
        ...

    def finish(self) -> None:
        """Wait until this rank's own work has ended."""
        ...

    @property
    def closes_alone(self) -> bool:
        """Whether `close` is local."""
        ...

    def close(self) -> None:
        """Give the memory back. Collective with NVSHMEM."""
        ...
