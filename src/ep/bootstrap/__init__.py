"""Who am I, and where are the others: launcher variables, channels between ranks, `World`."""

from ep.bootstrap.ranks import Backend, Place
from ep.bootstrap.world import World

__all__ = ["Backend", "Place", "World"]
