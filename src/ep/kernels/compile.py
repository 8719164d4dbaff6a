"""Compile kernels once and keep them: CUBINs in memory and on disk, launched by the driver API.

What is cached is the CUBIN and not the compiler's host object: it needs no compiler, no MLIR and
no CuTe DSL in the process that loads it, it holds for every device of its architecture, and its
parameters are plain scalars, which are checked here against the PTX they came from. A warm start
imports `cuda.bindings` and nothing else.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import re
import tempfile
import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ep.config import Protocol
from ep.errors import EpError
from ep.kernels import cache
from ep.memory.cuda import driver
from ep.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ep.kernels.options import KernelOptions
    from ep.layout import EpLayout

PINNED_COMPILER = "4.8.1"
"""nvidia-cutlass-dsl of the `gpu` extra."""
ARCHES = ("sm_90a", "sm_100a", "sm_103a")
"""Architectures that the kernels are made and tested for."""
CACHE_FORMAT = 2
"""Part of every key: raise it when the file format changes."""

_lock = threading.RLock()
_images: dict[str, Image] = {}


class Kind(StrEnum):
    """A kernel of this library."""

    DISPATCH = "dispatch"
    COMBINE = "combine"
    EMPTY = "empty"
    PING_PONG = "ping_pong"


_CLASSES = {
    Kind.DISPATCH: ("ep.kernels.dispatch", "EpDispatch"),
    Kind.COMBINE: ("ep.kernels.combine", "EpCombine"),
    Kind.EMPTY: ("ep.kernels.probe", "EpEmpty"),
    Kind.PING_PONG: ("ep.kernels.probe", "EpPingPong"),
}
"""Module and class of each kernel: named, so that only `build` needs the compiler."""
_FLAG_CLASSES = {
    Kind.DISPATCH: ("ep.kernels.flag_dispatch", "EpFlagDispatch"),
    Kind.COMBINE: ("ep.kernels.flag_combine", "EpFlagCombine"),
}
"""Those of `Protocol.FLAGS`."""


@dataclasses.dataclass(frozen=True)
class Image:
    """A compiled kernel.

    Attributes
    ----------
    entry : str
        Name of the kernel in the CUBIN.
    arch : str
        The architecture it runs on, as "sm_90a".
    threads : int
        Threads a CTA.
    params : tuple of (str, str)
        Name and PTX type ("u64", "u32", "f32") of each argument.
    cubin : bytes
    ptx : str
        What the CUBIN was made from; empty where it came from the disk.
    """

    entry: str
    arch: str
    threads: int
    params: tuple[tuple[str, str], ...]
    cubin: bytes
    ptx: str = ""

    def dumps(self, key: str) -> bytes:
        """Bytes of a cache file: a digest, and what it is of: a line of JSON, then the CUBIN."""
        head = {
            "key": key,
            "entry": self.entry,
            "arch": self.arch,
            "threads": self.threads,
            "params": self.params,
        }
        body = json.dumps(head).encode() + b"\n" + self.cubin
        return hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @classmethod
    def loads(cls, data: bytes, key: str) -> Image | None:
        """Read a cache file; None if it is damaged, or another kernel's than that of `key`."""
        digest, _, body = data.partition(b"\n")
        if digest != hashlib.sha256(body).hexdigest().encode():
            return None
        head, _, cubin = body.partition(b"\n")
        try:
            facts = json.loads(head)
            if facts["key"] != key:
                return None
            params = tuple((name, kind) for name, kind in facts["params"])
            return cls(facts["entry"], facts["arch"], facts["threads"], params, cubin)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def get_image(kind: Kind, layout: EpLayout, options: KernelOptions, arch: str) -> Image:
    """Compiled kernel from memory, else from disk, else from the compiler. Local; thread-safe.

    Several processes may miss at once: each compiles, and the file appears in one piece.

    Parameters
    ----------
    kind : Kind
    layout : EpLayout
    options : KernelOptions
    arch : str
        As "sm_90a"; `Device.arch` of `ep.memory.cuda` names a device's.

    Returns
    -------
    Image
    """
    key = cache_key(kind, layout, options, arch)
    name = f"{kind}-{arch}-{key}.bin"
    with _lock:
        image = _images.get(key)
        if image is None:
            data = cache.read(name)
            image = None if data is None else Image.loads(data, key)
            if image is None:
                image = _build_for_user(kind, layout, options, arch)
                cache.write(name, image.dumps(key))
            _images[key] = image
        return image


def _build_for_user(kind: Kind, layout: EpLayout, options: KernelOptions, arch: str) -> Image:
    try:
        return build(kind, layout, options, arch)
    except ModuleNotFoundError as error:
        raise EpError(
            f"the cache holds no {kind} kernel of this shape for {arch}, and there is no compiler "
            f"({error}); install the extra gpu of ep, or set EP_CACHE_DIR to a folder that this "
            "version of ep has filled elsewhere"
        ) from error


def build(kind: Kind, layout: EpLayout, options: KernelOptions, arch: str) -> Image:
    """Compile, whatever the caches hold. Needs CuTe DSL but no GPU."""
    classes = _CLASSES
    if layout.config.protocol is Protocol.FLAGS:
        classes = _CLASSES | _FLAG_CLASSES
    module, name = classes[kind]
    return build_kernel(getattr(importlib.import_module(module), name)(layout, options), arch)


def build_kernel(kernel: Any, arch: str) -> Image:
    """Compile a kernel, which may be a user's own. Needs CuTe DSL but no GPU.

    Parameters
    ----------
    kernel : object
        With the attributes `name`, `params` (name and Int64, Int32 or Float32 of each argument),
        `threads` and `kernel`, the `cute.kernel`; called with these arguments, then with the number
        of CTAs and a CUstream, it launches that.
    arch : str
        As "sm_90a".

    Returns
    -------
    Image

    Raises
    ------
    EpError
        If what was compiled does not take `params`.
    """
    import cuda.bindings.driver as cuda
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.base_dsl.compiler import DumpDir, GPUArch, KeepCUBIN, KeepPTX

    made = type(kernel)
    made.kernel.set_name_prefix(made.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    samples = [dtype(0) for _, dtype in made.params]
    # The compiler keeps its options in its own objects, so one compilation at a time.
    with _lock, tempfile.TemporaryDirectory(prefix="ep-") as scratch:
        compile_for = cute.compile[GPUArch(arch), KeepPTX, KeepCUBIN, DumpDir(scratch)]
        artifacts = compile_for(kernel, *samples, Int32(1), cuda.CUstream(0)).artifacts
    ptx_types = {Int64: "u64", Int32: "u32", Float32: "f32"}
    params = tuple((name, ptx_types[dtype]) for name, dtype in made.params)
    entry, found = _signature(artifacts.PTX)
    if found != [ptx_type for _, ptx_type in params]:
        raise EpError(f"{entry} takes {found}, not {params}: the compiler changed the arguments")
    return Image(entry, arch, kernel.threads, params, artifacts.CUBIN, artifacts.PTX)


def cache_key(kind: Kind, layout: EpLayout, options: KernelOptions, arch: str) -> str:
    """Digest of all that the CUBIN depends on."""
    config = dataclasses.asdict(layout.config)
    # An argument of the kernel, not part of it.
    del config["timeout_s"], config["grace_s"]
    facts = {
        "format": CACHE_FORMAT,
        "kind": kind,
        "arch": arch,
        "config": config,
        "options": dataclasses.asdict(options),
        "sources": sources_digest(),
        # Where no compiler is installed, only what the pinned one has made can be of use.
        "versions": [_version("nvidia-cutlass-dsl") or PINNED_COMPILER, __version__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


class Launcher:
    """A kernel loaded for all devices of this process. Thread-safe.

    Parameters
    ----------
    image : Image
    pdl : bool
        Launch so that the kernel may start before the one ahead of it in the stream has ended.
    """

    def __init__(self, image: Image, *, pdl: bool) -> None:
        import cuda.bindings.driver as cuda

        self.image = image
        self._cuda = cuda
        self._lock = threading.Lock()
        self._pdl = pdl
        self._args, self._pointers = self.pack([0] * len(image.params))
        self._library = driver("LibraryLoadData", image.cubin, None, None, 0, None, None, 0)
        self._kernel = driver("LibraryGetKernel", self._library, image.entry.encode())
        self._function = cuda.CUfunction(int(self._kernel))
        self._config = self.config(0, 1)

    def load(self) -> None:
        """Load into the current context now, so that a graph capture need not."""
        driver("KernelGetFunction", self._kernel)

    def close(self) -> None:
        """Unload. No launch may be under way, and no graph that holds one be launched again."""
        driver("LibraryUnload", self._library)

    def resident_ctas(self, num_sms: int) -> int:
        """CTAs of this kernel that the current device, of `num_sms` SMs, holds at once."""
        function = driver("KernelGetFunction", self._kernel)
        per_sm = driver(
            "OccupancyMaxActiveBlocksPerMultiprocessor", function, self.image.threads, 0
        )
        return int(per_sm) * num_sms

    def __call__(self, stream: int, num_ctas: int, *args: float) -> None:
        """Enqueue on `stream` (a CUstream as an integer); the stream's context is current.

        `args` are those of `image.params`, in order: addresses and integers as int, `f32` as float.
        """
        with self._lock:
            for slot, value in zip(self._args, args, strict=True):
                slot.value = value
            self._config.gridDimX = num_ctas
            self._config.hStream = self._cuda.CUstream(stream)
            # The driver copies the arguments before it returns.
            pointers = ctypes.addressof(self._pointers)
            driver("LaunchKernelEx", self._config, self._function, pointers, 0)

    @property
    def function(self) -> int:
        """Handle of the kernel, as a launch takes it."""
        return int(self._function)

    def pack(self, args: Sequence[float]) -> tuple[list[Any], ctypes.Array[ctypes.c_void_p]]:
        """Arguments in memory, and the addresses that a launch takes, while the first live."""
        kinds: dict[str, Any] = {
            "u64": ctypes.c_int64,
            "u32": ctypes.c_int32,
            "f32": ctypes.c_float,
        }
        values = [
            kinds[ptx_type](value)
            for (_, ptx_type), value in zip(self.image.params, args, strict=True)
        ]
        addresses = [ctypes.addressof(value) for value in values]
        return values, (ctypes.c_void_p * len(addresses))(*addresses)

    def config(self, stream: int, num_ctas: int) -> Any:
        """Make the driver's description of a launch on `stream`."""
        cuda = self._cuda
        config = cuda.CUlaunchConfig()
        config.gridDimX = num_ctas
        config.hStream = cuda.CUstream(stream)
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = self.image.threads
        config.sharedMemBytes = 0
        config.numAttrs = 0
        if self._pdl:
            early = cuda.CUlaunchAttribute()
            early.id = (
                cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [early]
            config.numAttrs = 1
        return config


def _signature(ptx: str) -> tuple[str, list[str]]:
    """Name and parameter types of the one kernel in `ptx`."""
    entries = re.findall(r"\.entry\s+(\w+)\s*\(([^)]*)\)", ptx)
    if len(entries) != 1:
        raise EpError(f"the compiler gave {len(entries)} kernels, want 1")
    entry, params = entries[0]
    return entry, re.findall(r"\.param\s+\.(\w+)\s+\w+", params)


@functools.cache
def sources_digest() -> str:
    """Digest of the files that the kernels are made from."""
    package = Path(__file__).resolve().parents[1]
    files = [package / name for name in ("config.py", "layout.py", "record.py")]
    files += sorted((package / "device").glob("*.py")) + sorted((package / "kernels").glob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
