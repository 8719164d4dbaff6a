"""What an engine reads before it can work: the tuning table, and the kernels. Collective."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ep.errors import ConfigError
from ep.kernels.compile import Kind, Launcher, get_image
from ep.kernels.options import KernelOptions, Pdl
from ep.kernels.tuning import Tuning, load_table

if TYPE_CHECKING:
    from contextlib import ExitStack

    from ep.bootstrap import World
    from ep.config import EpConfig
    from ep.layout import EpLayout


def read_tuning(world: World, config: EpConfig) -> Tuning:
    """Read the table's entry for this architecture, if it was measured for what `config` is.

    A rank that cannot read it fails on every rank.
    """
    assert world.device is not None
    tuning = Tuning()
    error: ConfigError | None = None
    try:
        tuning = load_table().get(world.device.arch, tuning)
    except ConfigError as problem:
        error = problem
    world.agree(error, "reading the tuning table")
    return tuning if tuning.fits(config) else Tuning()


def load_kernels(
    world: World, layout: EpLayout, options: KernelOptions, undo: ExitStack
) -> dict[Kind, dict[bool, Launcher]]:
    """Compile or read every kernel, one rank of a node first, so that the others find it cached.

    `undo` gets what unloads each.
    """
    assert world.device is not None
    arch = world.device.arch
    launchers: dict[Kind, dict[bool, Launcher]] = {Kind.DISPATCH: {}, Kind.COMBINE: {}}
    error: Exception | None = None
    for turn in (True, False):
        if turn == (world.local_rank == 0):
            try:
                for kind, norm in (
                    (Kind.DISPATCH, False),
                    (Kind.COMBINE, False),
                    (Kind.COMBINE, True),
                ):
                    choice = dataclasses.replace(options, norm=norm)
                    image = get_image(kind, layout, choice, arch)
                    launch = Launcher(image, pdl=options.pdl != Pdl.OFF)
                    undo.callback(launch.close)
                    launch.load()
                    launchers[kind][norm] = launch
            except Exception as problem:  # noqa: BLE001 - told to all ranks, whatever it is
                error = problem
        world.agree(error, "compiling kernels")
    return launchers
