"""Where a token goes: owners of its experts, addresses of the peers, rows of their buffers."""

from __future__ import annotations

import dataclasses
import math

from cutlass import Boolean, Constexpr, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ep.config import EpConfig
from ep.device import ptx
from ep.device.sync import WARP
from ep.layout import CHUNK_BYTES, CHUNK_SCALES, EMPTY_SOURCE, EpLayout


def stride(config: EpConfig) -> int:
    """Rows kept for each source: row of token t of source s is `s * stride + t`."""
    return EpLayout(config).stride


@cute.jit
def load_peers(table: Int64, ranks: Constexpr, rank: Int32) -> list[Int64]:
    """Bases of all ranks' buffers, spread over the warp: word w of lane l is rank `32 * w + l`.

    `table` is the address of `[ranks + 1]` int64, the own mapping last. It stands for the own rank
    here: the own peer mapping is never touched. Words past the last rank are the own base, too.
    An excluded rank's is 0. While kernels run the table does not change.
    """
    lane = cute.arch.lane_idx()
    peers = []
    for word in range_constexpr(-(-ranks // WARP)):
        entry = lane + WARP * word
        if entry > ranks or entry == rank:
            entry = Int32(ranks)
        peers.append(ptx.load_b64(table + Int64(entry) * 8))
    return peers


@cute.jit
def peer_base(peers: list[Int64], rank: Int32) -> Int64:
    """Base of the buffer of `rank`, which is the same in all lanes. All lanes take part."""
    idx = Uint32(rank)
    base = ptx.shfl(peers[0], idx % WARP)
    for word in range_constexpr(1, len(peers)):
        other = ptx.shfl(peers[word], idx % WARP)
        if idx // WARP == word:
            base = other
    return base


@cute.jit
def load_expert(ids: Int64, token: Int32, num_tokens: Int32, top_k: Constexpr) -> Int32:
    """The lane's id of `token`, or bits of its weight; -1 past top_k and past the tokens."""
    lane = cute.arch.lane_idx()
    expert = Int32(-1)
    if token < num_tokens and lane < top_k:
        expert = Int32(ptx.load_b32(ids + (Int64(token) * top_k + Int64(lane)) * 4))
    return expert


@cute.jit
def owners(expert: Int32, config: Constexpr) -> list[Uint32]:
    """Ranks that own an expert of any lane: word w, bit b is rank `32 * w + b`.

    `expert` is the lane's id. One outside 0..E-1, a masked one too, selects nobody.
    """
    base, extra = divmod(config.experts, config.ranks)
    idx = Uint32(expert)
    # The first `extra` ranks own one more, so two block sizes meet at the pivot.
    pivot = extra * (base + 1)
    owner = idx // (base + 1)
    if idx >= pivot:
        owner = (idx - pivot) // max(base, 1) + extra
    masks = []
    for word in range_constexpr(-(-config.ranks // WARP)):
        bit = Uint32(0)
        if idx < config.experts and owner // WARP == word:
            bit = Uint32(1) << (owner % WARP)
        masks.append(ptx.redux_or(bit))
    return masks


def present(peers: list[Int64]) -> list[Uint32]:
    """Ranks that have an address, as `load_peers` gives them: all but the excluded ones.

    Bits past the last rank mean nothing. All lanes take part.
    """
    return [ptx.ballot(base != 0) for base in peers]


def common(masks: list[Uint32], others: list[Uint32]) -> list[Uint32]:
    """Ranks in both of two sets."""
    return [mask & other for mask, other in zip(masks, others, strict=True)]


def is_empty(masks: list[Uint32]) -> Boolean:
    """Whether a set of ranks, as `owners` gives it, has no member."""
    every = masks[0]
    for mask in masks[1:]:
        every = every | mask
    return every == 0


@cute.jit
def pop_rank(masks: list[Uint32]) -> tuple[Int32, list[Uint32]]:
    """Lowest rank of a set and the set without it; no rank at all where the set is empty."""
    rank = ptx.lowest_bit(masks[0])
    rest = [masks[0] & (masks[0] - 1)]
    below = masks[0]
    for word in range_constexpr(1, len(masks)):
        mask = masks[word]
        if below == 0:
            rank = ptx.lowest_bit(mask) + WARP * word
            mask = mask & (mask - 1)
        rest.append(mask)
        below = below | masks[word]
    return rank, rest


@cute.jit
def empty_id(rank: Int32, config: Constexpr) -> Uint32:
    """Id that fills the ids of empty rows of `rank`; `EpConfig.empty_id` at run time."""
    fill = Uint32(0)
    if rank == 0:
        fill = Uint32(config.empty_id(0))
    return fill


def scale_width(config: EpConfig) -> int:
    """Bytes of the widest store that every scale row is a multiple of: 1, 2, 4, 8 or 16."""
    return math.gcd(16, config.hidden // 32)


def store_scales(addr: Int64, words: list[Uint32], width: int) -> None:
    """Store `width` bytes of scales, packed in `words`, at a multiple of `width`."""
    if width == 16:
        ptx.store_v4(addr, (words[0], words[1], words[2], words[3]))
    elif width == 8:
        ptx.store_v2(addr, (words[0], words[1]))
    else:
        store = {1: ptx.store_b8, 2: ptx.store_b16, 4: ptx.store_b32}[width]
        store(addr, words[0])


@cute.jit
def store_row_scales(at: Int64, chunk_idx: Int32, words: ptx.Vec4, config: Constexpr) -> None:
    """Store chunk `chunk_idx` of a row's scales, whose first byte is at `at`, as far as it goes."""
    width, num_scales = scale_width(config), config.hidden // 32
    for piece in range_constexpr(CHUNK_SCALES // width):
        first = chunk_idx * CHUNK_SCALES + piece * width
        if first < num_scales:
            part = [word >> (8 * (piece * width % 4)) for word in words[piece * width // 4 :]]
            store_scales(at + Int64(first), part, width)


@cute.jit
def store_choice(
    own: Int64, row: Int64, nth: Int32, expert: Uint32, weight: Uint32, layout: Constexpr
) -> None:
    """Store id and weight of choice `nth` of a row of this rank."""
    at = own + row * (4 * layout.config.top_k) + Int64(nth) * 4
    ptx.store_b32(at + layout.fields["ids"].offset_bytes, expert)
    ptx.store_b32(at + layout.fields["weights"].offset_bytes, weight)


def store_source(own: Int64, row: Int64, source: Uint32, layout: EpLayout) -> None:
    """Store the source word of a row of this rank, which makes it live."""
    at = own + layout.fields["header"].offset_bytes + row * CHUNK_BYTES
    ptx.store_v4(at, (source, Uint32(0), Uint32(0), Uint32(0)))


@cute.jit
def rearm_row(own: Int64, row: Int64, rank: Int32, tid: Int32, layout: Constexpr) -> None:
    """Make a row of this rank empty again; `x` may stay. The threads of a CTA share the work.

    Where threads of the CTA read the row's header, a barrier has come since.
    """
    fields, top_k = layout.fields, layout.config.top_k
    width = scale_width(layout.config)
    scale_bytes = layout.config.hidden // 32
    if tid < top_k:
        at = own + row * (4 * top_k) + Int64(tid) * 4
        ptx.store_b32(at + fields["ids"].offset_bytes, empty_id(rank, layout.config))
        ptx.store_b32(at + fields["weights"].offset_bytes, Uint32(0))
    if tid < scale_bytes // width:
        at = own + fields["scales"].offset_bytes + row * scale_bytes + Int64(tid) * width
        # A stale scale of 255 is NaN, and 0 x NaN would poison a GEMM that does not skip the row.
        store_scales(at, [Uint32(0)] * 4, width)
    if tid == 0:
        store_source(own, row, Uint32(EMPTY_SOURCE & 0xFFFFFFFF), layout)


@cute.jit
def has_rank(masks: list[Uint32], rank: Int32) -> Boolean:
    """Whether a set of ranks has a member."""
    mask = masks[0]
    for word in range_constexpr(1, len(masks)):
        if Uint32(rank) // WARP == word:
            mask = masks[word]
    return (mask >> (Uint32(rank) % WARP)) & 1 != 0


UNROLLED_RANKS = 8
"""Up to so many, each rank's base has a register of its own in every thread."""


@dataclasses.dataclass(frozen=True)
class Peers:
    """Where the ranks' buffers are. The own peer mapping is never touched.

    Attributes
    ----------
    ranks : int
    by_lane : list of Int64
        As `load_peers` gives it.
    all : list of Int64
        Base of every rank in every lane, where they are few, else empty.
    """

    ranks: int
    by_lane: list[Int64]
    all: list[Int64]

    @classmethod
    def load(cls, table: Int64, ranks: int, rank: Int32) -> Peers:
        """Read them from `table`."""
        every = []
        if ranks <= UNROLLED_RANKS:
            every = [ptx.load_b64(table + 8 * idx) for idx in range(ranks)]
        return cls(ranks, load_peers(table, ranks, rank), every)

    def present(self) -> list[Uint32]:
        """Ranks that are not excluded. All lanes take part."""
        return present(self.by_lane)

    def store_others(
        self, masks: list[Uint32], rank: Int32, live: Boolean, offset: Int64, chunk: ptx.Vec4
    ) -> None:
        """Where `live`, store a chunk at `offset` of every member's buffer but the own one."""
        _store_chunks(self, masks, rank, live, offset, chunk)

    def store_all(
        self,
        masks: list[Uint32],
        rank: Int32,
        live: Boolean,
        at_own: Int64,
        offset: Int64,
        chunk: ptx.Vec4,
    ) -> None:
        """The same, and at address `at_own` where this rank is a member. All lanes take part."""
        _store_chunks(self, masks, rank, live, offset, chunk)
        _store_own(masks, rank, live, at_own, chunk)


@cute.jit
def _store_own(masks: list[Uint32], rank: Int32, live: Boolean, at: Int64, chunk: ptx.Vec4) -> None:
    if live and has_rank(masks, rank):
        ptx.store_v4(at, chunk)


@cute.jit
def _store_chunks(
    peers: Peers, masks: list[Uint32], rank: Int32, live: Boolean, offset: Int64, chunk: ptx.Vec4
) -> None:
    if const_expr(len(peers.all) > 0):
        for dst_rank in range_constexpr(len(peers.all)):
            if live and (masks[0] >> dst_rank) & 1 != 0 and dst_rank != rank:
                ptx.store_b128(peers.all[dst_rank] + offset, chunk)
    else:
        rest = masks
        while not is_empty(rest):
            dst_rank, rest = pop_rank(rest)
            base = peer_base(peers.by_lane, dst_rank)
            if live and dst_rank != rank:
                ptx.store_b128(base + offset, chunk)
