"""Shows: dispatch and combine inside of jax.jit, on XLA's own stream, enqueued by C++.

Run with: mpirun -np 2 python examples/04_jax.py (or alone; EP_SHARE_GPUS=1 for two on one GPU)

It needs a C compiler and a C++ one: XLA calls native code (04_jax.cc), which calls the exported
library of this exchange. No Python runs between the layers, and nothing waits for the GPU.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# JAX takes three quarters of the GPU's memory otherwise, whoever else is there.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

import ep
import toy_layer
from ep.export.binding import Library
from ep.memory.local import LocalMemory
from ep.memory.nvshmem import NvshmemMemory

COMPILER = ("c++", "-std=c++17", "-O2", "-w", "-fPIC", "-shared")


def build(config: ep.EpConfig, arch: str, folder: Path) -> Library:
    """Export the exchange, compile the handlers and tell XLA of them. Engines do it ahead."""
    shape = folder / "toy_layer.toml"
    names = ("hidden", "experts", "top_k")
    shape.write_text("".join(f"{name} = {getattr(config, name)}\n" for name in names))
    export = [sys.executable, "-m", "ep.export", f"--config={shape}", f"--ranks={config.ranks}"]
    export += [f"--max-tokens={config.max_tokens}", f"--arch={arch}", f"--output={folder}"]
    subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
    handlers = str(folder / "handlers.so")
    source = str(Path(__file__).with_suffix(".cc"))
    command = ["/usr/bin/env", *COMPILER, f"-I{folder}", f"-I{jax.ffi.include_dir()}", source]
    command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lep", "-o", handlers]
    subprocess.run(command, check=True)
    functions = ctypes.CDLL(handlers)
    for name in ("Dispatch", "Combine"):
        function = jax.ffi.pycapsule(getattr(functions, name))
        jax.ffi.register_ffi_target(f"ep_{name.lower()}", function, platform="CUDA")
    return Library(folder / "libep.so")


def shapes(arrays: Any) -> list[jax.ShapeDtypeStruct]:
    """Describe arrays as results."""
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


class Layers:
    """Two layers that take turns with one exchange; `forward` is for jax.jit."""

    def __init__(self, config: ep.EpConfig, rank: int, exchange: int) -> None:
        self.config = config
        self.local = config.local_experts(rank)
        self.exchange = np.int64(exchange)
        self.step = jax.jit(self.forward, donate_argnums=3)

    def forward(
        self, x: Any, ids: Any, weights: Any, rows: tuple[Any, ...], norm_weight: Any
    ) -> tuple[Any, tuple[Any, ...]]:
        """Give BF16 `[T, H]`, and the rows. The norm weight is an argument, never a result."""
        results = shapes(rows)
        y = jax.ShapeDtypeStruct(x.shape, x.dtype)
        send = jax.ffi.ffi_call(
            "ep_dispatch",
            results,
            has_side_effect=True,
            input_output_aliases={3 + place: place for place in range(len(rows))},
        )
        bring = jax.ffi.ffi_call(
            "ep_combine",
            [y, *results],
            has_side_effect=True,
            input_output_aliases={3 + place: 1 + place for place in range(len(rows))},
        )
        eps = np.float32(toy_layer.EPS)
        for _ in range(2):
            rows = send(x, ids, weights, *rows, exchange=self.exchange)
            partials = self.experts(*rows)
            x, *rows = bring(partials, ids, norm_weight, *rows, exchange=self.exchange, eps=eps)
        return x, tuple(rows)

    def experts(self, x: Any, scales: Any, ids: Any, weights: Any) -> Any:
        """Give the partials `[rows, H]`; yours will be a grouped GEMM that takes MXFP8."""
        is_local = (ids >= self.local.start) & (ids < self.local.stop)
        factor = (weights * is_local * (1 + ids / 8)).sum(1, keepdims=True)
        blocks = x.astype(jnp.float32).reshape(*scales.shape, 32)
        blocks *= scales.astype(jnp.float32)[..., None]
        return (blocks.reshape(x.shape) * factor).astype(jnp.bfloat16)


def main() -> None:
    """Run six steps."""
    with ep.World.connect(backend="gpu") as world, tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_cuda_visible_devices", str(world.device.ordinal))
        config, rank = toy_layer.config_for(world), world.rank
        library = build(config, world.device.arch, Path(folder))
        layout = ep.EpLayout(config)
        home = LocalMemory if world.is_one_process else NvshmemMemory
        memory = home.allocate(world, world.device, layout.total_bytes)
        *peers, own = memory.addresses
        timeouts = {"timeout_us": int(config.timeout_s * 1e6), "ranks_on_gpu": world.ranks_on_gpu}
        exchange = library.open(rank, own, peers, **timeouts)
        library.arm(exchange)
        layers = Layers(config, rank, exchange.value)
        buffers = ep.EpBuffers(layout, memory, rank)
        # The receive rows themselves, no copies.
        names = ("x", "scales", "ids", "weights")
        rows = tuple(jax.dlpack.from_dlpack(buffers.own(name)) for name in names)
        gains = jnp.asarray(toy_layer.norm_weight(config))
        world.barrier()
        for number in range(6):
            arrays = map(jnp.asarray, toy_layer.inputs(config, number, rank))
            y, rows = layers.step(*arrays, rows, gains)
            toy_layer.check(np.asarray(y), config, number, rank, layers=2)
            assert library.poll(exchange).phase == 0
        print(f"rank {rank}: 6 steps came back right", flush=True)
        del rows, y
        world.barrier()
        library.call("ep_close", exchange)
        buffers.close()


if __name__ == "__main__":
    main()
