"""Steps of changing size and routing, bit for bit against the oracle; fabric memory between nodes.

Collective: every rank of the job comes here, on a world that has found its ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from typing import TYPE_CHECKING

from ep.bench.bridge import open_bridge
from ep.bench.cases import Case
from ep.bench.check import run_checked_step
from ep.bootstrap import Backend, World
from ep.config import EpConfig
from ep.doctor.gpu import IMEX_REMEDY
from ep.doctor.probe import FabricBlock, import_block
from ep.doctor.result import Mark, Result, failed, in_words_of, passed, skipped
from ep.errors import EpError
from ep.exchange import Exchange
from ep.routing import Routing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ep.doctor.ranks import Survey
    from ep.doctor.result import Finding, Options

AREA = "self-check"
SIZES = (8, 1, 0, 5, 2, 7, 3)
"""Most tokens a rank sends, in turn: few, since the oracle makes every rank's on the host."""
EVERY_FULL = 50
"""The first of so many steps has as many tokens as the buffer has room for."""


def tokens_of_step(number: int, max_tokens: int) -> int:
    """Most tokens that a rank sends in step `number`, counted from 1."""
    if (number - 1) % EVERY_FULL == 0:
        return max_tokens
    return min(max_tokens, SIZES[number % len(SIZES)])


def check_steps(
    options: Options, backend: Backend, tell: Callable[[str], None]
) -> tuple[Finding, bool]:
    """Run the steps on a world and an exchange of their own. Collective.

    Parameters
    ----------
    options : Options
    backend : Backend
    tell : callable
        Told of each step before it begins.

    Returns
    -------
    Finding
        Of this rank.
    in_order : bool
        Whether this rank knows that the others are where it is. If not, some may never come to
        leave the job.
    """
    if not options.steps:
        return skipped("not asked for (--steps 0)"), True
    try:
        return _run_steps(options, backend, tell), True
    except Exception as error:  # noqa: BLE001 - the other ranks are to hear of it
        # Without the rank that says it, so that ranks that met the same are told together.
        words = re.sub(r"^rank \d+: ", "", in_words_of(error))
        remedy = "look at the checks above first, then at what the words name"
        if backend is Backend.GPU:
            remedy += "; NVSHMEM_DEBUG=INFO says more of NVSHMEM"
        finding = failed(f"{backend} backend: {words}", remedy)
        return finding, isinstance(error, EpError) and error.on_every_rank


def _run_steps(options: Options, backend: Backend, tell: Callable[[str], None]) -> Finding:
    start = time.monotonic()
    # Below the bound of the world that collects the findings: it must outlast this one.
    bound_s = options.timeout_s / 2
    world = World.connect(backend, timeout_s=bound_s)
    try:
        finding = _run_steps_on(world, bound_s, options, tell)
    except EpError as error:
        # On GPUs what has failed may hang when it is ended.
        if error.on_every_rank and world.backend is Backend.HOST:
            with contextlib.suppress(EpError):
                world.close()
        raise
    if finding.mark is Mark.FAIL:
        return finding
    # One clock: words that differ would be told rank by rank.
    took_s = world.allgather(time.monotonic() - start, "ending the self-check")[0]
    world.close()
    return passed(f"{finding.words} ({took_s:.0f} s)")


def _run_steps_on(
    world: World, bound_s: float, options: Options, tell: Callable[[str], None]
) -> Finding:
    backend = world.backend
    config = EpConfig.load(options.config, ranks=world.size, max_tokens=options.max_tokens)
    config = dataclasses.replace(config, timeout_s=min(config.timeout_s, bound_s / 2))
    routings = list(Routing)
    tell("making an exchange")
    exchange = Exchange(world, config)
    bridge = open_bridge(exchange)
    for number in range(1, options.steps + 1):
        tell(f"step {number} of {options.steps}")
        case = Case(
            config=config,
            routing=routings[number % len(routings)],
            uneven=True,
            norm=number % 4 != 0,
        )
        step = case.step(number, tokens_of_step(number, config.max_tokens))
        complaint = run_checked_step(exchange, step, bridge)
        said = world.allgather(complaint and str(complaint), "comparing with the oracle")
        if any(said):
            bad = [words for words in said if words]
            return failed(
                f"{backend} backend, {step.case.routing} routing: {bad[0]}"
                + (f"; {len(bad)} ranks in all" if len(bad) > 1 else ""),
                "run it again, and launch/test.sh; then report it as a bug, with this document",
            )
    bridge.close()
    exchange.close()
    return passed(f"{options.steps} steps on the {backend} backend are right, bit for bit")


def check_fabric_between(control: World, survey: Survey) -> list[Result]:
    """Import fabric memory of a rank on another node: only that shows one IMEX domain. Collective.

    Parameters
    ----------
    control : World
        Not on the GPU backend: nothing is exchanged but handles.
    survey : Survey

    Returns
    -------
    list of Result
        Of this rank.
    """
    own = survey.gpus[control.rank]
    block, words = None, ""
    if own is None:
        words = "no GPU"
    else:
        try:
            block = FabricBlock(own.ordinal).__enter__()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            words = in_words_of(error)
    handles = control.allgather(block.exported.hex() if block else "", "sharing fabric handles")
    machine = survey.places[control.rank].machine
    far = [rank for rank, place in enumerate(survey.places) if place.machine != machine]
    # The next one, so that not all import from the same.
    peers = [rank for rank in far if rank > control.rank] or far
    if peers and own is not None and handles[peers[0]]:
        try:
            import_block(bytes.fromhex(handles[peers[0]]), own.ordinal)
        except Exception as error:  # noqa: BLE001 - the same
            words = words or f"memory of rank {peers[0]} cannot be imported: {in_words_of(error)}"
    control.barrier("importing fabric handles")
    if block is not None:
        block.__exit__()
    finding = failed(words, IMEX_REMEDY) if words else passed("memory of another node was imported")
    return [Result(AREA, "fabric between nodes", finding)]
