"""Who am I, and where are the others: launcher variables, channels between ranks, `World`."""

from ep.bootstrap.world import Backend, Place, World

__all__ = ["Backend", "Place", "World"]
