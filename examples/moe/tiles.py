"""What the kernels share: views of memory, and a warp's product of MXFP8 rows and weights."""

from typing import Any

import cutlass
from cutlass import (
    BFloat16,
    Constexpr,
    Float8E4M3FN,
    Float32,
    Int64,
    Uint8,
    Uint32,
    cute,
    range_constexpr,
)
from cutlass.cute.nvgpu.warp import MmaF16BF16Op

from ep.device import ptx
from ep.reference import SCALE_BLOCK

LANES = 4
"""Of a block of 32 along K each of four lanes takes 8 neighbours: one load of 8 bytes."""
SHARE = SCALE_BLOCK // LANES
UNROLL = 4
"""Blocks along K whose loads are under way at once."""


def follow() -> None:
    """Wait for the kernel ahead, and let the next one start, which waits for this one.

    What a kernel owes that is launched by programmatic dependent launch, before it reads or writes
    anything; ep's kernels count on it.
    """
    ptx.griddepcontrol_wait()
    ptx.griddepcontrol_launch_dependents()


def view(dtype: Any, address: Int64, count: int) -> cute.Tensor:
    """`count` elements of global memory; the address is a multiple of the bytes of all of them."""
    pointer = cute.make_ptr(
        dtype, address, cute.AddressSpace.gmem, assumed_align=count * dtype.width // 8
    )
    return cute.make_tensor(pointer, cute.make_layout(count))


def column(tile: int) -> Any:
    """Row of the weights that the lane loads for column block `tile` of a product of 32 columns.

    A lane loads column `lane // 4` of each block of 8, and gets columns `2 * (lane % 4)` and the
    next of each back. So permuted, what it gets back of four blocks are 8 neighbours.
    """
    lane = cute.arch.lane_idx() // LANES
    return 8 * (lane // 2) + 2 * tile + lane % 2


@cute.jit
def dequantize(elements: Int64, scale: Int64) -> Any:
    """8 elements of a block as BF16. Exact: E4M3 has 4 significant bits, a scale none."""
    # An E8M0 byte is the exponent of an FP32; of a 0 the elements are zeros.
    factor = (Uint32(view(Uint8, scale, 1)[0]) << 23).bitcast(Float32)
    return (view(Float8E4M3FN, elements, SHARE).load().to(Float32) * factor).to(BFloat16)


@cute.jit
def multiply(
    rC: cute.Tensor,
    rows: list[Int64],
    row_scales: list[Int64],
    weights: list[Int64],
    weight_scales: list[Int64],
    depth: Constexpr,
) -> None:
    """Add the product of 16 rows and 8 columns a block of weights to `rC`. All lanes take part.

    Parameters
    ----------
    rC : Tensor
        FP32 `(4, 1, blocks)`: of block b columns `2 * (lane % 4)` and the next, of row `lane // 4`,
        then of row `lane // 4 + 8`.
    rows, row_scales : list of Int64
        Addresses of rows `lane // 4` and `lane // 4 + 8` of the tile.
    weights, weight_scales : list of Int64
        Addresses of the row of the weights that is the lane's column of each block.
    depth : int
        K.

    Notes
    -----
    The instruction wants of a row that lane q of a quad holds elements 2q, 2q + 1, 2q + 8 and
    2q + 9 of 16. A sum does not care which they are as long as rows and weights agree, so q takes
    8 neighbours of 32, for two instructions.
    """
    mma = cute.make_tiled_mma(MmaF16BF16Op(BFloat16, Float32, (16, 8, 16)))
    lane = cute.arch.lane_idx() % LANES
    for block in cutlass.range(depth // SCALE_BLOCK, unroll=UNROLL):
        at = Int64(block * SCALE_BLOCK + lane * SHARE)
        rA = cute.make_rmem_tensor((8, 1, 2), BFloat16)
        rB = cute.make_rmem_tensor((4, len(weights), 2), BFloat16)
        for half in range_constexpr(2):
            values = dequantize(rows[half] + at, row_scales[half] + Int64(block))
            for idx in range_constexpr(SHARE):
                rA[4 * (idx // 2 % 2) + 2 * half + idx % 2, 0, idx // 4] = values[idx]
        for column_block in range_constexpr(len(weights)):
            values = dequantize(
                weights[column_block] + at, weight_scales[column_block] + Int64(block)
            )
            for idx in range_constexpr(SHARE):
                rB[idx % 4, column_block, idx // 4] = values[idx]
        cute.gemm(mma, rC, rA, rB, rC)
