"""The receiving half of dispatch: wait for the peers' rows and copy them to where experts read."""

from __future__ import annotations

from cutlass import Boolean, Int32, Int64, Uint32, Uint64, cute, range_constexpr

from ep.device import bounded, ptx, rows, wire
from ep.device.bounded import Watch
from ep.device.home import Control, Home
from ep.device.stamps import Stamps
from ep.device.sync import POLLS_PER_CLOCK
from ep.kernels.options import KernelOptions
from ep.layout import CHUNK_BYTES, NOTHING, PARITIES, EpLayout
from ep.record import Stamp


class RowReceiver:
    """What receiver CTAs do: a thread a chunk.

    Parameters
    ----------
    layout : EpLayout
    options : KernelOptions
    threads : int
        Of a CTA.
    """

    def __init__(self, layout: EpLayout, options: KernelOptions, threads: int) -> None:
        self.layout = layout
        self.config = layout.config
        self.options = options
        self.threads = threads
        self.passes = -(-layout.row_chunks // threads)
        self.num_sources = self.config.ranks - 1

    @cute.jit
    def warm(self, home: Home, receiver: Int32) -> None:
        """Touch what the first row needs."""
        tid, _, _ = cute.arch.thread_idx()
        ptx.touch(home.control(Control.COMBINED))
        src_rank, token = self._first_row(receiver, home.rank)
        ptx.touch(home.field("x") + home.row(src_rank, token) * self.config.hidden)
        ptx.touch(home.base + wire.announcement(self.layout, Uint32(0), src_rank))
        for half in range_constexpr(PARITIES):
            staged = wire.staged_row(self.layout, Uint32(half), src_rank, token)
            chunk = min(tid, self.layout.head_chunk)
            ptx.touch(home.base + staged + Int64(chunk) * CHUNK_BYTES)

    @cute.jit
    def _first_row(self, receiver: Int32, rank: Int32) -> tuple[Int32, Int32]:
        """Source and token that a receiver begins with."""
        per_round = max(self.num_sources, 1)
        src_rank = Int32(Uint32(receiver) % per_round)
        if src_rank >= rank:
            src_rank = src_rank + 1
        token = Int32(Uint32(receiver) // per_round)
        return src_rank, min(token, self.config.max_tokens - 1)

    @cute.jit
    def receive(
        self,
        receiver: Int32,
        num_receivers: Int32,
        peers: list[Int64],
        step: Int64,
        watch: Watch,
        clock: Stamps,
    ) -> list[Uint32]:
        """Receive the rows of this CTA: of some sources all, or of one source some.

        Gives the ranks that the thread gave up.
        """
        # As many CTAs for each source as there are; where they are few, each has several sources.
        groups = min(num_receivers, self.num_sources)
        per_round = max(self.num_sources, 1)
        nth = Int32(Uint32(receiver) % per_round)
        first = Int32(Uint32(receiver) // per_round)
        apart = max(Int32(Uint32(num_receivers) // per_round), 1)
        here = rows.present(peers)
        lost = bounded.nobody(watch.num_words)
        while nth < self.num_sources:
            src_rank = nth
            if src_rank >= watch.home.rank:
                src_rank = src_rank + 1
            token = first
            more = token < apart and rows.has_rank(here, src_rank)
            while more:
                num_tokens, over = self._receive_row(src_rank, token, step, watch)
                if token == first and nth == Int32(Uint32(receiver) % per_round):
                    clock.mark(Stamp.FIRST)
                clock.mark(Stamp.LAST)
                token = token + apart
                more = token < num_tokens
                if over:
                    lost = bounded.rank_bits(src_rank, watch.num_words)
                    nth = Int32(self.num_sources)
            nth = nth + groups
        return lost

    @cute.jit
    def _receive_row(
        self, src_rank: Int32, token: Int32, step: Int64, watch: Watch
    ) -> tuple[Int32, Boolean]:
        """Receive a row, if there is one; gives the source's tokens, 0 where time ran out.

        Each thread waits for its own chunks. The head says whether they come; where not even a head
        comes, the announcement says so. A thread that gives up fills what it waited for with NaN:
        others may have all that they waited for.
        """
        tid, _, _ = cute.arch.thread_idx()
        home, parity = watch.home, wire.parity(step)
        staged = home.base + wire.staged_row(
            self.layout, parity, src_rank, min(token, self.config.max_tokens - 1)
        )
        line = home.base + wire.announcement(self.layout, parity, src_rank)
        mine = [tid + idx * self.threads for idx in range(self.passes)]
        # Past the last chunk a thread looks at the head.
        addrs = [staged + Int64(min(chunk, self.layout.head_chunk)) * CHUNK_BYTES for chunk in mine]
        chunks = [(Uint32(NOTHING),) * 4 for _ in mine]
        num_tokens, is_row, source = Int32(0), Boolean(False), Uint32(0)
        since_ns, over = Uint64(0), Boolean(False)
        waiting = Boolean(True)
        while waiting:
            polls = Int32(0)
            while waiting and polls < POLLS_PER_CLOCK:
                here = Boolean(True)
                for idx in range_constexpr(self.passes):
                    chunks[idx] = ptx.load_b128(addrs[idx])
                    here = here and wire.has_arrived(chunks[idx])
                head = ptx.load_b128(staged + self.layout.head_chunk * CHUNK_BYTES)
                said = ptx.load_b128(line)
                is_told = wire.is_of(head, step)
                source = wire.source_of(head)
                is_row = is_told and source != wire.NO_TOKEN
                num_tokens = wire.tokens_of(said)
                is_none = wire.is_of(said, step) and token >= num_tokens
                if is_told:
                    num_tokens = wire.tokens_of(head)
                waiting = not (is_none or (is_told and (here or not is_row)))
                polls += 1
            if waiting:
                over, since_ns = bounded.is_over(since_ns, watch)
                if over:
                    num_tokens, is_row, waiting = Int32(0), Boolean(False), Boolean(False)
                    chunks = [self._nothing(chunk) for chunk in mine]
        if is_row or over:
            row = home.row(src_rank, min(token, self.config.max_tokens - 1))
            for idx in range_constexpr(self.passes):
                if mine[idx] < self.layout.head_chunk:
                    self._store_chunk(home, row, mine[idx], chunks[idx])
                    wire.take(addrs[idx])
                elif mine[idx] == self.layout.head_chunk and is_row:
                    rows.store_source(home.base, row, source, self.layout)
        return num_tokens, over

    @cute.jit
    def _nothing(self, chunk_idx: Int32) -> ptx.Vec4:
        """A chunk that becomes NaN where experts read it, or an id of nobody."""
        chunk = (Uint32(NOTHING),) * 4
        if chunk_idx >= self.layout.x_chunks and chunk_idx < self.layout.first_choice_chunk:
            chunk = wire.seal_scales(chunk)
        return chunk

    @cute.jit
    def empty_all(self, receiver: Int32, num_receivers: Int32, home: Home) -> None:
        """Make every row empty: after a kernel that gave up nothing must look like news."""
        tid, _, _ = cute.arch.thread_idx()
        row = receiver
        while row < self.layout.rows:
            rows.rearm_row(home.base, Int64(row), home.rank, tid, self.layout)
            row = row + num_receivers

    @cute.jit
    def _store_chunk(self, home: Home, row: Int64, chunk_idx: Int32, chunk: ptx.Vec4) -> None:
        """Store a chunk of a row where the experts read it."""
        hidden = self.config.hidden
        if chunk_idx < self.layout.x_chunks:
            at = home.field("x") + row * hidden
            ptx.store_v4(at + Int64(chunk_idx) * CHUNK_BYTES, chunk)
        elif chunk_idx < self.layout.first_choice_chunk:
            at = home.field("scales") + row * (hidden // 32)
            nth = chunk_idx - self.layout.x_chunks
            rows.store_row_scales(at, nth, wire.open_scales(chunk), self.config)
        else:
            nth = chunk_idx - self.layout.first_choice_chunk
            rows.store_choice(home.base, row, nth, chunk[0], chunk[1], self.layout)
