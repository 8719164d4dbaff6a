"""Kernels of the layer, compiled once and kept on disk, as ep keeps its own."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ep.kernels import cache
from ep.kernels.compile import PINNED_COMPILER, Image, build_kernel, sources_digest

if TYPE_CHECKING:
    from moe.sizes import Sizes

KERNELS = {
    "route": ("moe.router", "MoeRouter"),
    "group": ("moe.grouping", "MoeGroup"),
    "up": ("moe.experts", "MoeUp"),
    "down": ("moe.experts", "MoeDown"),
    "sum": ("moe.experts", "MoeSum"),
}
"""Module and class, imported only to compile: they need CuTe DSL."""


def get_image(name: str, sizes: Sizes, arch: str) -> Image:
    """Compiled kernel from `EP_CACHE_DIR`, else from the compiler. Local.

    Parameters
    ----------
    name : str
        One of `KERNELS`.
    sizes : Sizes
    arch : str
        As "sm_90a".

    Returns
    -------
    Image

    Raises
    ------
    ModuleNotFoundError
        If the cache does not hold it, and CuTe DSL is not installed.
    """
    key = _key(name, sizes, arch)
    file = f"moe-{name}-{arch}-{key}.bin"
    data = cache.read(file)
    image = None if data is None else Image.loads(data, key)
    if image is None:
        image = build(name, sizes, arch)
        cache.write(file, image.dumps(key))
    return image


def build(name: str, sizes: Sizes, arch: str) -> Image:
    """Compile, whatever the cache holds. Needs CuTe DSL but no GPU."""
    module, kernel = KERNELS[name]
    return build_kernel(getattr(importlib.import_module(module), kernel)(sizes), arch)


def _key(name: str, sizes: Sizes, arch: str) -> str:
    """Digest of all that a kernel is made from: its sizes, this folder, what it uses of ep."""
    digest = hashlib.sha256(sources_digest().encode())
    facts = (name, arch, PINNED_COMPILER, dataclasses.asdict(sizes))
    digest.update(json.dumps(facts).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]
