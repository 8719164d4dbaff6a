"""`Lifecycle`: when an exchange may be used, and how it goes on or ends after a failure."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ep.bootstrap import Backend, World
from ep.bootstrap.ranks import ranks_to_exclude
from ep.config import Protocol
from ep.errors import EpError, EpTimeout, StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from ep.config import EpConfig
    from ep.engine import Engine
    from ep.exchange import Received
    from ep.layout import EpLayout


class Sent(NamedTuple):
    """A dispatch that no combine has answered."""

    tokens: int
    stream: Any
    values: Any = None
    """Of the ids, where values are checked."""


_UNDER_WAY = {
    phase: StateError(f"{phase}, which did not come to its end")
    for phase in ("dispatch", "combine")
}
"""What an exchange stopped at, unless something better is known."""


class Lifecycle:
    """What `Exchange` does beside moving tokens. Not made by itself.

    One call at a time; none after one that did not come to its end, until `reset`.
    """

    def __init__(self, world: World, config: EpConfig, layout: EpLayout) -> None:
        self.world = world
        self.config = config
        self.layout = layout
        self._number = world.next_exchange()
        self._calls: dict[object, None] = {}
        self._broken: EpError | None = None
        self._received: Any = None
        self._engine: Engine | None = None
        self._is_armed = self._is_started = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._sent: Sent | None = None

    def arm(self) -> None:
        """Write the whole of this rank's buffer: all rows empty. Local, waits for it.

        For an exchange that was made with `start=False`, once; `reset` does it again later. Since
        peers make no step before `start`, it may be called at any time.

        Raises
        ------
        StateError
            If the exchange is closed, or has been started.
        """
        with self._in_use():
            self._arm(self._before_start())

    def start(self) -> None:
        """Wait for every rank: from here on steps may be made. Collective.

        For an exchange that was made with `start=False`, once. Arms the buffer if `arm` did not.

        Raises
        ------
        EpTimeout
            Naming the ranks that did not come. The call may be repeated after `World.regroup`.
        StateError
            As `arm`.
        """
        with self._in_use():
            engine = self._before_start()
            if not self._is_armed:
                self._arm(engine)
            self.world.barrier("arming the buffers")
            self._is_started = True

    def _before_start(self) -> Engine:
        if self._engine is None:
            raise StateError("this Exchange is closed; make a new one")
        if self._is_started:
            raise StateError("this Exchange has started; reset arms it again, on every rank")
        self.world.check_open()
        return self._engine

    def _arm(self, engine: Engine) -> None:
        # A second arming may end halfway.
        self._is_armed = False
        engine.rearm(0, self.world.excluded)
        self._is_armed = True

    @property
    def received(self) -> Received:
        """What every `dispatch` returns, for those that bind arrays before the first one.

        The views are always the same, and hold rows from a dispatch to its combine only.

        Raises
        ------
        StateError
            If the exchange is closed.
        """
        if self._engine is None:
            raise StateError("this Exchange is closed; make a new one")
        received: Received = self._received
        return received

    def poll(self) -> None:
        """Raise if a wait on the device has expired. Local; does not wait for the device.

        Raises
        ------
        EpTimeout
            Again at every call: the steps since then are lost, until `reset` or `exclude`.
        """
        if isinstance(self._broken, EpTimeout):
            raise copy.copy(self._broken)
        with self._turn():
            pass

    def check(self) -> None:
        """Wait for the work of this rank's GPU, then raise as `poll` does. Local, bounded.

        Not while a graph is captured.
        """
        if self._broken is None:
            with self._turn() as engine:
                engine.finish()
        self.poll()

    def reset(self) -> None:
        """Go on after a step that failed, on the same memory. Collective over ranks not excluded.

        Waits until every rank has come, whatever each was doing, then makes all rows empty. What
        was under way is lost: the next call is `dispatch`. Graphs that were captured stay valid.
        NVSHMEM and MPI are not started anew.

        Raises
        ------
        CollectiveError
            If another rank resets another exchange.
        EpTimeout
            Naming the ranks that did not come within the World's bound; the exchange is as it was.
        """
        self._rearm(())

    def exclude(self, ranks: Iterable[int]) -> None:
        """Do as `reset`, and go on without `ranks` from now on. Collective over the others.

        Tokens get nothing from experts of excluded ranks: no partial, and no weight is changed for
        it. Rows of excluded ranks stay empty. They are excluded from the World, too: other
        exchanges of it follow by their own `reset`, and no new one can be made. A rank that is
        excluded must not use the World any more; if its process lives, kill it.

        Parameters
        ----------
        ranks : iterable of int
            The same on every rank that stays. Those that are excluded already may be left out.

        Raises
        ------
        ArgumentError
            If they are not ranks, or this one is among them.
        CollectiveError
            On every rank, if they do not exclude the same.
        EpTimeout
            As `reset`.
        StateError
            With the flag protocol on GPUs, which knows no excluded ranks.
        """
        self._rearm(ranks)

    def _rearm(self, ranks: Iterable[int]) -> None:
        with self._in_use():
            engine = self._engine
            if engine is None:
                raise StateError("this Exchange is closed; make a new one")
            world = self.world
            ranks = ranks_to_exclude(ranks, world.rank, world.size)
            is_yardstick = self.layout.config.protocol is Protocol.FLAGS
            if is_yardstick and world.backend is Backend.GPU and (ranks or world.excluded):
                raise StateError(
                    "the flag protocol excludes no ranks on GPUs; make the exchange with "
                    f"protocol={str(Protocol.FENCE_FREE)!r}"
                )
            engine.finish()
            world.regroup(ranks)
            self._broken = StateError("reset, which did not come to its end")
            what = f"resetting exchange {self._number}"
            steps = [step for step in world.allgather(engine.step, what) if step is not None]
            engine.rearm(max(steps), world.excluded)
            self._forget_step()
            world.barrier("going on after a reset")
            self._broken = None
            self._is_armed = self._is_started = True

    def close(self) -> None:
        """Give the buffer back. Collective the first time; nothing after that.

        Views that `dispatch` returned must not be used any more. Nor may graphs that hold calls of
        this exchange be launched; they are released before it or after.

        Raises
        ------
        StateError
            If another thread is in a call of this exchange; it is not closed then.
        """
        with self._in_use():
            if self._engine is None:
                return
            self.world.check_process()
            self._received = None
            try:
                self._engine.finish()
                # Nobody may still be storing into a peer's buffer when it goes.
                self.world.barrier("closing an exchange")
            except BaseException:
                self._abandon()
                raise
            engine, self._engine = self._engine, None
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        # Otherwise peers may be anywhere, and waiting for them could hang: the world ends the job.

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        # Not a lock: an interrupt after it is taken, and before that is known here, would keep it
        # for ever. Each of these lines is one step that an interrupt cannot divide.
        call = object()
        try:
            self._calls[call] = None
            self._check_alone()
            yield
        finally:
            self._calls.pop(call, None)

    def _check_alone(self) -> None:
        if len(self._calls) > 1:
            raise StateError("this Exchange is in use by another thread; make one for each")

    @contextmanager
    def _turn(self) -> Iterator[Engine]:
        with self._in_use():
            yield self._ready()

    def _ready(self) -> Engine:
        """Give the engine, if this exchange may be used. Within `_in_use`."""
        engine = self._engine
        if engine is None:
            raise StateError("this Exchange is closed; make a new one")
        # Its memory may have ended with the world, and a kernel would not notice.
        self.world.check_open()
        if not self._is_started:
            raise StateError("this Exchange has not started; call start on every rank")
        if self._broken is not None:
            raise StateError(
                f"this Exchange stopped at: {self._broken}; reset it with all ranks, exclude "
                "the dead, or close it"
            )
        try:
            engine.poll()
        except EpTimeout as error:
            error = self.world.explain(error)
            self._stop(error, "poll")
            raise error from None
        return engine

    def _again(self, launch: Callable[[], None], step: Sent, *, answers: bool) -> None:
        """Make a prepared call: the dispatch of `step`, or the combine that answers one like it.

        What `_turn` does, without a context manager, which would cost more than all else here.
        """
        call = object()
        try:
            self._calls[call] = None
            if len(self._calls) > 1:
                self._check_alone()
            engine = self._ready()
            self._check_order(step if answers else None)
            engine.resume(step.stream)
            if answers:
                self._commit("combine", launch, None)
            else:
                self._commit("dispatch", launch, step)
        finally:
            self._calls.pop(call, None)

    def _check_order(self, answered: Sent | None) -> None:
        """Raise unless the next call may be a dispatch, or a combine that answers such a one."""
        sent = self._sent
        if answered is None:
            if sent is not None:
                raise StateError("dispatch follows a dispatch; call combine in between")
        elif sent is None:
            raise StateError("combine without a dispatch; call dispatch first")
        elif sent.stream != answered.stream:
            raise StateError(
                f"combine on stream {answered.stream:#x} answers a dispatch on stream "
                f"{sent.stream:#x}; pass the same stream to both"
            )
        elif sent.tokens != answered.tokens:
            raise StateError(
                f"a prepared combine of {answered.tokens} tokens answers a dispatch of "
                f"{sent.tokens}; prepare a step for each number of tokens"
            )

    def _commit(self, phase: str, launch: Callable[[], None], sent: Sent | None) -> None:
        """Have the ranks in step again, or this exchange stopped: `launch`, then remember `sent`.

        What stands before `_broken` is set leaves the exchange as it was, whatever it raises.
        """
        # Set before, for an exception may come from anywhere and at any point: a signal's handler.
        self._broken = _UNDER_WAY[phase]
        try:
            launch()
            self._sent = sent
        except EpTimeout as error:
            error = self.world.explain(error)
            self._stop(error, phase)
            raise error from None
        except BaseException as error:
            self._stop(error, phase)
            raise
        self._broken = None

    def _stop(self, error: BaseException, phase: str) -> None:
        if isinstance(error, EpTimeout):
            self.world.note_timeout()
            # A copy: the traceback of the one that is raised holds views of the memory.
            self._broken = copy.copy(error)
        else:
            self._broken = StateError(f"{phase}, ended by {error!r}")

    def _abandon(self) -> None:
        """Give back what needs no other rank, since they may be anywhere."""
        engine, self._engine = self._engine, None
        self._received = None
        if engine is not None and engine.closes_alone:
            engine.close()
            # No other exchange: those that were not told may still store into them.
            engine.buffers.is_taken = True
