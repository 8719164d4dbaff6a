"""The experts: two grouped products over tiles of pairs, and the weighted sum of each row."""

import cuda.bindings.driver as cuda
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute, range_constexpr

from ep.device import mxfp8, ptx
from ep.device.sync import WARP
from ep.reference import SCALE_BLOCK
from moe.sizes import TILE, Sizes
from moe.tiles import LANES, column, follow, multiply, view

BLOCKS = SCALE_BLOCK // 8
"""Blocks of 8 columns that a warp computes: those of one scale."""


class MoeUp:
    """SiLU(gate) * up of each pair, quantized again: a warp computes 16 pairs by 32 elements.

    Parameters
    ----------
    sizes : Sizes
    """

    name = "moe_up"
    params = (
        ("x", Int64),
        ("scales", Int64),
        ("gate_up", Int64),
        ("gate_up_scales", Int64),
        ("pair_of_slot", Int64),
        ("expert_of_tile", Int64),
        ("num_tiles", Int64),
        ("between", Int64),
        ("between_scales", Int64),
    )
    threads = 4 * WARP

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @cute.jit
    def __call__(
        self,
        x: Int64,
        scales: Int64,
        gate_up: Int64,
        gate_up_scales: Int64,
        pair_of_slot: Int64,
        expert_of_tile: Int64,
        num_tiles: Int64,
        between: Int64,
        between_scales: Int64,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`.

        Parameters
        ----------
        x, scales : Int64
            Addresses of the received rows, MXFP8 `[rows, H]`.
        gate_up, gate_up_scales : Int64
            Of this rank's experts, MXFP8 `[local, 2 * I, H]`.
        pair_of_slot, expert_of_tile, num_tiles : Int64
            As `MoeGroup` wrote them.
        between, between_scales : Int64
            MXFP8 `[slots, I]`, written; of slots without a pair it means nothing.
        num_ctas : Int32
            Any number: they share the tiles that there are.
        stream : CUstream
        """
        self.kernel(
            x,
            scales,
            gate_up,
            gate_up_scales,
            pair_of_slot,
            expert_of_tile,
            num_tiles,
            between,
            between_scales,
        ).launch(grid=[num_ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        scales: Int64,
        gate_up: Int64,
        gate_up_scales: Int64,
        pair_of_slot: Int64,
        expert_of_tile: Int64,
        num_tiles: Int64,
        between: Int64,
        between_scales: Int64,
    ) -> None:
        """Device side."""
        follow()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        hidden, size = self.sizes.hidden, self.sizes.intermediate
        warps, blocks = self.threads // WARP, size // SCALE_BLOCK
        item = cta * warps + cute.arch.warp_idx()
        end = view(Int32, num_tiles, 1)[0] * blocks
        while item < end:
            tile, block = item // blocks, item % blocks
            rows = [
                self._row(pair_of_slot, tile * TILE + cute.arch.lane_idx() // LANES + 8 * half)
                for half in range(2)
            ]
            expert = view(Int32, expert_of_tile + Int64(tile) * 4, 1)[0]
            # Blocks of the gate's rows, then the same of the up projection's.
            weights = [
                Int64(expert) * (2 * size) + Int64(part * size + block * SCALE_BLOCK + column(idx))
                for part in range(2)
                for idx in range(BLOCKS)
            ]
            rC = cute.make_rmem_tensor((4, 1, 2 * BLOCKS), Float32)
            rC.fill(0.0)
            multiply(
                rC,
                [x + row * hidden for row in rows],
                [scales + row * (hidden // SCALE_BLOCK) for row in rows],
                [gate_up + row * hidden for row in weights],
                [gate_up_scales + row * (hidden // SCALE_BLOCK) for row in weights],
                hidden,
            )
            for half in range_constexpr(2):
                slot = Int64(tile * TILE + cute.arch.lane_idx() // LANES + 8 * half)
                self._store(
                    [_activated(rC, 2 * half, idx) for idx in range(BLOCKS)],
                    between + slot * size + Int64(block) * SCALE_BLOCK,
                    between_scales + slot * blocks + Int64(block),
                )
            item += ctas * warps

    @cute.jit
    def _row(self, pair_of_slot: Int64, slot: Int32) -> Int64:
        """Row of a slot; without a pair row 0, for nobody."""
        pair = view(Int32, pair_of_slot + Int64(slot) * 4, 1)[0]
        return Int64(max(pair, 0) // self.sizes.top_k)

    @cute.jit
    def _store(self, words: list[Uint32], elements: Int64, scale: Int64) -> None:
        """Quantize a block of 32, of which each lane of a quad has 8 neighbours."""
        lane = cute.arch.lane_idx() % LANES
        amax = mxfp8.block_amax(words)
        # That was of two lanes.
        amax = max(amax, ptx.shfl_xor(amax, 2))
        byte = mxfp8.scale_byte(amax)
        factor = mxfp8.scale_factor(byte)
        halves = []
        for word in words:
            even, odd = (ptx.mul_f32(value, factor) for value in ptx.cvt_f32x2(word))
            halves.append(ptx.cvt_e4m3x2(even, odd))
        packed = (halves[0] | (halves[1] << 16), halves[2] | (halves[3] << 16))
        ptx.store_v2(elements + Int64(lane) * 8, packed)
        if lane == 0:
            ptx.store_b8(scale, byte)


def _activated(rC: cute.Tensor, first: int, block: int) -> Uint32:
    """SiLU(gate) * up of two neighbouring columns, as a BF16 pair."""
    made = []
    for idx in (first, first + 1):
        gate, up = rC[idx, 0, block], rC[idx, 0, BLOCKS + block]
        made.append(gate / (1.0 + cute.math.exp(-gate)) * up)
    return ptx.cvt_bf16x2(*made)


class MoeDown:
    """The down projection of each pair: a warp computes 16 pairs by 32 elements.

    Parameters
    ----------
    sizes : Sizes
    """

    name = "moe_down"
    params = (
        ("between", Int64),
        ("between_scales", Int64),
        ("down", Int64),
        ("down_scales", Int64),
        ("expert_of_tile", Int64),
        ("num_tiles", Int64),
        ("made", Int64),
    )
    threads = 4 * WARP

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @cute.jit
    def __call__(
        self,
        between: Int64,
        between_scales: Int64,
        down: Int64,
        down_scales: Int64,
        expert_of_tile: Int64,
        num_tiles: Int64,
        made: Int64,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`.

        Parameters
        ----------
        between, between_scales : Int64
            Addresses of MXFP8 `[slots, I]`.
        down, down_scales : Int64
            Of this rank's experts, MXFP8 `[local, H, I]`.
        expert_of_tile, num_tiles : Int64
            As `MoeGroup` wrote them.
        made : Int64
            Of float32 `[slots, H]`, written; of slots without a pair it means nothing.
        num_ctas : Int32
            Any number: they share the tiles that there are.
        stream : CUstream
        """
        self.kernel(
            between, between_scales, down, down_scales, expert_of_tile, num_tiles, made
        ).launch(grid=[num_ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        between: Int64,
        between_scales: Int64,
        down: Int64,
        down_scales: Int64,
        expert_of_tile: Int64,
        num_tiles: Int64,
        made: Int64,
    ) -> None:
        """Device side."""
        follow()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        hidden, size = self.sizes.hidden, self.sizes.intermediate
        warps, blocks = self.threads // WARP, hidden // SCALE_BLOCK
        item = cta * warps + cute.arch.warp_idx()
        end = view(Int32, num_tiles, 1)[0] * blocks
        while item < end:
            tile, block = item // blocks, item % blocks
            slots = [
                Int64(tile * TILE + cute.arch.lane_idx() // LANES + 8 * half) for half in range(2)
            ]
            expert = view(Int32, expert_of_tile + Int64(tile) * 4, 1)[0]
            weights = [
                Int64(expert) * hidden + Int64(block * SCALE_BLOCK + column(idx))
                for idx in range(BLOCKS)
            ]
            rC = cute.make_rmem_tensor((4, 1, BLOCKS), Float32)
            rC.fill(0.0)
            multiply(
                rC,
                [between + slot * size for slot in slots],
                [between_scales + slot * (size // SCALE_BLOCK) for slot in slots],
                [down + row * size for row in weights],
                [down_scales + row * (size // SCALE_BLOCK) for row in weights],
                size,
            )
            first = Int64(block * SCALE_BLOCK + cute.arch.lane_idx() % LANES * 8)
            for half in range_constexpr(2):
                for quarter in range_constexpr(2):
                    at = slots[half] * hidden + first + 4 * quarter
                    gMade = view(Float32, made + at * 4, 4)
                    for idx in range_constexpr(4):
                        gMade[idx] = rC[2 * half + idx % 2, 0, 2 * quarter + idx // 2]
            item += ctas * warps


class MoeSum:
    """Partials: the weighted sum over this rank's experts of each row, in order of its choices.

    Parameters
    ----------
    sizes : Sizes
    """

    name = "moe_sum"
    params = (
        ("made", Int64),
        ("slot_of_pair", Int64),
        ("weights", Int64),
        ("partials", Int64),
    )
    threads = 128

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @cute.jit
    def __call__(
        self,
        made: Int64,
        slot_of_pair: Int64,
        weights: Int64,
        partials: Int64,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`.

        Parameters
        ----------
        made : Int64
            Address of float32 `[slots, H]`.
        slot_of_pair : Int64
            As `MoeGroup` wrote it.
        weights : Int64
            Of float32 `[rows, K]`, as received.
        partials : Int64
            Of bfloat16 `[rows, H]`, written where a row has a choice here.
        num_ctas : Int32
            The number of rows.
        stream : CUstream
        """
        self.kernel(made, slot_of_pair, weights, partials).launch(
            grid=[num_ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, made: Int64, slot_of_pair: Int64, weights: Int64, partials: Int64) -> None:
        """Device side."""
        follow()
        row, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        hidden, top_k = self.sizes.hidden, self.sizes.top_k
        chunk = tid
        while chunk < hidden // 4:
            rSum = cute.make_rmem_tensor(4, Float32)
            rSum.fill(0.0)
            is_live = False
            for choice in range_constexpr(top_k):
                at = Int64(row * top_k + choice) * 4
                slot = view(Int32, slot_of_pair + at, 1)[0]
                if slot >= 0:
                    is_live = True
                    weight = view(Float32, weights + at, 1)[0]
                    place = made + (Int64(slot) * hidden + Int64(chunk) * 4) * 4
                    rSum.store(rSum.load() + view(Float32, place, 4).load() * weight)
            if is_live:
                place = partials + (Int64(row) * hidden + Int64(chunk) * 4) * 2
                view(BFloat16, place, 4).store(rSum.load().to(BFloat16))
            chunk += self.threads
