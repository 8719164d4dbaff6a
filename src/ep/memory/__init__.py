"""Symmetric heaps: the same number of bytes on every rank, each addressable by all."""

from ep.memory.symmetric import SymmetricMemory

__all__ = ["SymmetricMemory"]
