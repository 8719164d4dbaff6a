"""Dispatch and combine as CuTe DSL kernels, and the cache of what they compile to."""
