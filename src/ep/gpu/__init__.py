"""The GPU backend. Importing it needs the `gpu` extra's bindings, but no GPU."""

from ep.gpu.engine import GpuEngine

__all__ = ["GpuEngine"]
