"""What the GPU cases share."""

import importlib

import ep
from ep.bench.check import Where
from tests.multirank.worker import SHAPES


def agree(world, complaint):
    said = [words for words in world.allgather(complaint and str(complaint)) if words]
    if said:
        raise AssertionError("\n".join(said))


def config_of(world, shape, max_tokens, **fields):
    return ep.EpConfig(ranks=world.size, max_tokens=max_tokens, **(SHAPES[shape] | fields))


def where(world):
    return Where(world.rank, 0, "dispatch")


def installed(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
