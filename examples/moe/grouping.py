"""Pairs of row and choice, sorted by expert: each fills tiles of its own."""

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute

from moe.sizes import TILE, Sizes
from moe.tiles import follow, view


class MoeGroup:
    """Give each pair that chose a local expert a slot, an expert's in tiles of 16.

    One CTA, which is enough for what a step of decode receives. In which order pairs of one expert
    get their slots is chance: no result depends on it.

    Parameters
    ----------
    sizes : Sizes
    """

    name = "moe_group"
    params = (
        ("ids", Int64),
        ("slot_of_pair", Int64),
        ("pair_of_slot", Int64),
        ("expert_of_tile", Int64),
        ("num_tiles", Int64),
        ("first_expert", Int32),
        ("num_experts", Int32),
    )
    threads = 1024

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    @cute.jit
    def __call__(
        self,
        ids: Int64,
        slot_of_pair: Int64,
        pair_of_slot: Int64,
        expert_of_tile: Int64,
        num_tiles: Int64,
        first_expert: Int32,
        num_experts: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `stream`.

        Parameters
        ----------
        ids : Int64
            Address of int32 `[rows, K]`, as received.
        slot_of_pair : Int64
            Of int32 `[pairs]`, written: -1 where the expert is another rank's. Pair
            `row * K + choice`.
        pair_of_slot : Int64
            Of int32 `[slots]`, written: -1 where there is none.
        expert_of_tile : Int64
            Of int32 `[tiles]`, written as far as there are tiles: local, from 0.
        num_tiles : Int64
            Of one int32, written.
        first_expert, num_experts : Int32
            This rank's.
        num_ctas : Int32
            1.
        stream : CUstream
        """
        self.kernel(
            ids,
            slot_of_pair,
            pair_of_slot,
            expert_of_tile,
            num_tiles,
            first_expert,
            num_experts,
        ).launch(grid=[num_ctas, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        ids: Int64,
        slot_of_pair: Int64,
        pair_of_slot: Int64,
        expert_of_tile: Int64,
        num_tiles: Int64,
        first_expert: Int32,
        num_experts: Int32,
    ) -> None:
        """Device side."""
        follow()
        tid, _, _ = cute.arch.thread_idx()
        length = self.sizes.local_experts
        sCount = cute.make_tensor(cute.arch.alloc_smem(Int32, length, 16), cute.make_layout(length))
        sNext = cute.make_tensor(cute.arch.alloc_smem(Int32, length, 16), cute.make_layout(length))
        expert = tid
        while expert < length:
            sCount[expert] = Int32(0)
            expert += self.threads
        slot = tid
        while slot < self.sizes.slots:
            view(Int32, pair_of_slot + Int64(slot) * 4, 1)[0] = Int32(-1)
            slot += self.threads
        cute.arch.sync_threads()
        pair = tid
        while pair < self.sizes.pairs:
            expert = view(Int32, ids + Int64(pair) * 4, 1)[0] - first_expert
            if expert >= 0 and expert < num_experts:
                cute.arch.atomic_add(sCount.iterator + expert, Int32(1), sem="relaxed", scope="cta")
            pair += self.threads
        cute.arch.sync_threads()
        self._lay_out_tiles(sCount, sNext, expert_of_tile, num_tiles)
        cute.arch.sync_threads()
        pair = tid
        while pair < self.sizes.pairs:
            expert = view(Int32, ids + Int64(pair) * 4, 1)[0] - first_expert
            slot = Int32(-1)
            if expert >= 0 and expert < num_experts:
                slot = cute.arch.atomic_add(
                    sNext.iterator + expert, Int32(1), sem="relaxed", scope="cta"
                )
                view(Int32, pair_of_slot + Int64(slot) * 4, 1)[0] = pair
            view(Int32, slot_of_pair + Int64(pair) * 4, 1)[0] = slot
            pair += self.threads

    @cute.jit
    def _lay_out_tiles(
        self, sCount: cute.Tensor, sNext: cute.Tensor, expert_of_tile: Int64, num_tiles: Int64
    ) -> None:
        """Each expert's tiles follow those of the experts before it; a thread an expert."""
        expert, _, _ = cute.arch.thread_idx()
        while expert < self.sizes.local_experts:
            tile = Int32(0)
            for before in range(expert):
                tile += (sCount[before] + TILE - 1) // TILE
            sNext[expert] = tile * TILE
            end = tile + (sCount[expert] + TILE - 1) // TILE
            while tile < end:
                view(Int32, expert_of_tile + Int64(tile) * 4, 1)[0] = expert
                tile += 1
            if expert == self.sizes.local_experts - 1:
                view(Int32, num_tiles, 1)[0] = end
            expert += self.threads
