"""The sending half of combine: store the partials of the peers' rows in their sources' slots."""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from ep.device import norm, ptx, rows, wire
from ep.device.home import Control, Home
from ep.device.stamps import Stamps
from ep.device.sync import WARP
from ep.kernels.options import KernelOptions, Warm
from ep.layout import CHUNK_BYTES, EMPTY_SOURCE, PARITIES, EpLayout
from ep.record import Stamp

MAX_WARPS = 16


class Chunks:
    """How the chunks of a row of BF16 are spread over the threads of a CTA.

    A thread has one chunk in each pass; a warp's chunks are one segment of the norm.

    Parameters
    ----------
    hidden : int
    """

    def __init__(self, hidden: int) -> None:
        segments = -(-hidden // norm.SEGMENT)
        self.passes = -(-segments // MAX_WARPS)
        self.warps = -(-segments // self.passes)
        self.threads = WARP * self.warps
        self.total = hidden // norm.CHUNK

    def idx(self, nth: int) -> Int32:
        """The thread's chunk of 8 elements in pass `nth`."""
        tid, _, _ = cute.arch.thread_idx()
        return tid + nth * self.threads

    def is_live(self, nth: int) -> Boolean | bool:
        """Whether the thread has a chunk in pass `nth`: a constant where all threads have."""
        if self.total >= (nth + 1) * self.threads:
            return True
        return self.idx(nth) < self.total


class RowSender:
    """What sender CTAs do: a CTA a row.

    Parameters
    ----------
    layout : EpLayout
    options : KernelOptions
    chunks : Chunks
    """

    def __init__(self, layout: EpLayout, options: KernelOptions, chunks: Chunks) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        self.chunks = chunks
        self.num_sources = self.config.ranks - 1
        self.num_words = -(-self.config.ranks // WARP)

    @cute.jit
    def warm(self, partials: Int64, home: Home, peers: list[Int64], first: Int32) -> None:
        """Touch what the first row needs; what is read there may still be changing."""
        tid, _, _ = cute.arch.thread_idx()
        position = Uint32(first)
        ptx.touch(home.control(Control.DISPATCHED))
        ptx.touch(home.field("counts"))
        if self._exists(position):
            row = self._row(position, home)
            ptx.touch(home.field("header") + row * CHUNK_BYTES)
            chunk = min(tid, self.chunks.total - 1)
            at = partials + row * (2 * self.config.hidden)
            ptx.touch(at + Int64(chunk) * CHUNK_BYTES)
            if const_expr(self.options.warm == Warm.PEERS):
                for half in range_constexpr(PARITIES):
                    base, offset = self._slot(peers, home.rank, position, Uint32(half))
                    if tid == 0 and base != 0:
                        ptx.touch(base + offset)

    @cute.jit
    def send(
        self,
        partials: Int64,
        home: Home,
        peers: list[Int64],
        first: Int32,
        num_senders: Int32,
        clock: Stamps,
    ) -> None:
        """Send the peers' live rows of this CTA, sender `first`, and make them empty.

        Positions count through all peers' token 0, then 1, and so on, so that the work follows
        the live tokens; lane l looks at the l-th position of the CTA. Nothing is sent after a
        kernel that gave up.
        """
        tid, _, _ = cute.arch.thread_idx()
        position = Uint32(first)
        # Mostly it is live, and then its latency is hidden behind that of the header.
        chunks = self._load_row(partials, position, home)
        sources = self._load_sources(home, position, num_senders)
        step, stopped = home.load_step(Control.DISPATCHED)
        end = self._live_positions(home)
        more = Boolean(True)
        while more:
            # Each warp goes through the same rounds, whatever it has heard: they meet at a barrier.
            live = ptx.ballot(sources >= 0 and not stopped)
            rest = live
            here = position + Uint32(ptx.lowest_bit(rest)) * Uint32(num_senders)
            if rest != 0 and here != Uint32(first):
                chunks = self._load_row(partials, here, home)
            while rest != 0:
                rest = rest & (rest - 1)
                # The next row is under way while this one leaves.
                after = position + Uint32(ptx.lowest_bit(rest)) * Uint32(num_senders)
                following = chunks
                if rest != 0:
                    following = self._load_row(partials, after, home)
                if here == Uint32(first):
                    clock.mark(Stamp.QUANTIZED, chunks[0][0])
                self._send_row(peers, home.rank, here, wire.parity(step), chunks)
                clock.mark(Stamp.SENT)
                here, chunks = after, following
            # All warps have seen the headers before the first row is made empty.
            ptx.barrier()
            while live != 0:
                here = position + Uint32(ptx.lowest_bit(live)) * Uint32(num_senders)
                live = live & (live - 1)
                rows.rearm_row(home.base, self._row(here, home), home.rank, tid, self.layout)
            position = position + Uint32(num_senders) * WARP
            more = position < end
            if more:
                sources = self._load_sources(home, position, num_senders)

    @cute.jit
    def _send_row(
        self,
        peers: list[Int64],
        rank: Int32,
        position: Uint32,
        parity: Uint32,
        chunks: list[ptx.Vec4],
    ) -> None:
        """Store a partial in its slot at its source."""
        base, offset = self._slot(peers, rank, position, parity)
        at = base + offset
        for idx in range_constexpr(self.chunks.passes):
            if self.chunks.is_live(idx):
                ptx.store_b128(
                    at + Int64(self.chunks.idx(idx)) * CHUNK_BYTES, wire.seal(chunks[idx])
                )

    @cute.jit
    def _slot(
        self, peers: list[Int64], rank: Int32, position: Uint32, parity: Uint32
    ) -> tuple[Int64, Int64]:
        """Buffer of a position's source, and the slot's offset there. All lanes take part."""
        src_rank, token = self._source(position, rank)
        return rows.peer_base(peers, src_rank), wire.slot(self.layout, parity, token, rank)

    @cute.jit
    def _source(self, position: Uint32, rank: Int32) -> tuple[Int32, Int32]:
        """Source rank, never the own one, and token of a position."""
        src_rank = Int32(position % max(self.num_sources, 1))
        if src_rank >= rank:
            src_rank = src_rank + 1
        return src_rank, Int32(position // max(self.num_sources, 1))

    def _row(self, position: Uint32, home: Home) -> Int64:
        """Row of a position."""
        src_rank, token = self._source(position, home.rank)
        return home.row(src_rank, token)

    def _exists(self, position: Uint32) -> Boolean:
        return position < self.num_sources * self.config.max_tokens

    @cute.jit
    def _live_positions(self, home: Home) -> Uint32:
        """Positions up to the last token of the source that sent most."""
        lane = cute.arch.lane_idx()
        most = Uint32(0)
        for word in range_constexpr(self.num_words):
            if lane + WARP * word < self.config.ranks:
                at = home.field("counts") + Int64(lane + WARP * word) * 4
                most = max(most, ptx.load_b32(at))
        return ptx.redux_max(most) * self.num_sources

    @cute.jit
    def _load_sources(self, home: Home, position: Uint32, num_senders: Int32) -> Int32:
        """Source word of the lane's position: -1 where the row is empty or there is none."""
        here = position + Uint32(cute.arch.lane_idx()) * Uint32(num_senders)
        source = Int32(EMPTY_SOURCE)
        if self._exists(here):
            at = home.field("header") + self._row(here, home) * CHUNK_BYTES
            source = Int32(ptx.load_b32(at))
        return source

    @cute.jit
    def _load_row(self, partials: Int64, position: Uint32, home: Home) -> list[ptx.Vec4]:
        """The thread's chunks of the partial of a position; zeros where there is none."""
        at = partials + self._row(position, home) * (2 * self.config.hidden)
        chunks = []
        for idx in range_constexpr(self.chunks.passes):
            chunk = self.chunks.idx(idx)
            live = self.chunks.is_live(idx) and self._exists(position)
            chunks.append(ptx.load_v4_if(live, at + Int64(chunk) * CHUNK_BYTES))
        return chunks
