"""The host backend: the same contract without a GPU, for engines' tests and for `ep.bench`."""

from ep.host.engine import HostEngine

__all__ = ["HostEngine"]
