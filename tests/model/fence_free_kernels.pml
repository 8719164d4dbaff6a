/* Kernels of the fence-free protocol: see fence_free.pml, which includes this. */

inline choose_dests(token) {
    if
    :: dests[r * TOKENS + token] = 0
    :: dests[r * TOKENS + token] = 1 << ((r + 1) % N)
#if N == 3
    :: dests[r * TOKENS + token] = 1 << ((r + 2) % N)
    :: dests[r * TOKENS + token] = ((1 << N) - 1) ^ (1 << r)
#endif
    fi
}

inline choose_tokens() {
    if
    :: tokens[r] = 0
    :: r < SENDERS && (r == 0 || MOST > 0) -> tokens[r] = 1; choose_dests(0)
#if TOKENS == 2
    :: r < SENDERS && (r == 0 || MOST > 1) -> tokens[r] = 2; choose_dests(0); choose_dests(1)
#endif
    fi
}

inline announce(epoch, count) {
    EACH_RANK(WHEN(i != r,
        STORE_NOTE(announcement, announcement_sent, HALF_AT(ANNOUNCED_HALF(epoch), i, r),
            NOTE(epoch, count), SPOILS_ANNOUNCEMENTS, ANNOUNCED_HALF(epoch), i)))
}

/* What a thread of dispatch on rank d sees of source s. */
#define SAID(d, s) announcement[HALF_AT(ANNOUNCED_HALF(EPOCH(d)), d, s)]
#define IS_IDLE(d) (BUG == BUG_IDLE_RECEIVES_NOT && tokens[d] == 0)
#define IS_TOLD(d, s) \
    ((BUG == BUG_ANNOUNCEMENT_UNDATED -> SAID(d, s) != 0 : IS_OF(SAID(d, s), EPOCH(d))) || \
        IS_IDLE(d) || (BUG == BUG_IDLE_UNAWAITED && s != 0))
#define SAID_TOKENS(d, s) (IS_IDLE(d) -> 0 : SAYS(SAID(d, s)))

#if TOKENS == 1 || defined(SPREAD)
#define FIRST_TOKENS TOKENS
#else
#define FIRST_TOKENS 1
#endif

inline launch_dispatch() {
    d_step {
        step[r] = SUCCESSOR(step[r]);
        assert(!is_ahead[r]);
        is_ahead[r] = 1;
        WHEN(ALL_RANKS(IS_AHEAD), EACH_RANK(is_ahead[i] = 0))
    }
    choose_tokens();
    d_step {
        EACH_ROW(WHEN(i != r && j < FIRST_TOKENS,
            row_threads[CELL(r, i, j)] = POLLS_HEAD | POLLS_TAIL;
            receivers_left[r] = receivers_left[r] + 2));
        herald_runs[r] = 1;
        assert(BUG || EPOCH(r) == step[r])
    }
}

inline begin_step() {
    WHEN(BUG != BUG_IDLE_SILENT || tokens[r] > 0, announce(EPOCH(r), tokens[r]));
    dispatched[r] = EPOCH(r)
}

#define STAGED(peer, token) HALF_CELL(STAGING_HALF(EPOCH(r)), peer, r, token)
#define SEND_HEAD(peer, token, live) \
    STORE_NOTE(head, head_sent, STAGED(peer, token), \
        NOTE(EPOCH(r), HEAD_SAYS(TOLD_TOKENS, live)), SPOILS_HEADS, STAGING_HALF(EPOCH(r)), peer)
#if BUG == BUG_HEAD_MISCOUNTS
#define TOLD_TOKENS tokens_before[r]
#elif defined(HEADS_OVERSTATE)
#define TOLD_TOKENS TOKENS
#else
#define TOLD_TOKENS tokens[r]
#endif

inline send_rows() {
    EACH_ROW(WHEN(i != r && j < tokens[r],
        if
        :: (dests[r * TOKENS + j] >> i) & 1 ->
            SEND_HEAD(i, j, LIVE);
            STORE(tail, tail_sent, STAGED(i, j), step[r] + 1)
        :: else -> WHEN(BUG != BUG_ABSENT_UNSENT, SEND_HEAD(i, j, 0))
        fi))
}

#define CLEARED(d, s) clearance[HALF_AT(ANNOUNCED_HALF(LAST_EPOCH(d)), d, s)]
#define IS_CLEARED(d, s) \
    (BUG == BUG_CLEARANCE_UNHEARD || \
        IS_OF(CLEARED(d, s), LAST_EPOCH(d)))
#define HAS_HEARD(peer) \
    ((peer) == r || BUG == BUG_HERALD_DEAF || \
        (BUG == BUG_HERALD_FORGETS && (peer) == (r + 1) % N) || \
        (IS_TOLD(r, peer) && IS_CLEARED(r, peer)))

inline end_dispatch() {
    (receivers_left[r] == 0 && ALL_RANKS(HAS_HEARD)) || BUG == BUG_OVERLAP_COMBINE;
    herald_runs[r] = 0;
    EACH_ROW(
        /* The experts find nothing early, of another step, or that the count does not tell. */
        value = row[CELL(r, i, j)];
        assert(value == source[CELL(r, i, j)]);
        assert(value == 0 ||
            (value == step[r] + 1 && IS_TOLD(r, i) && j < SAID_TOKENS(r, i)));
        /* Nothing is lost: what was sent to here in this step has arrived and was taken. */
        value = HALF_CELL(STAGING_HALF(EPOCH(r)), r, i, j);
        assert(BUG || !(IS_NEWS(tail[value]) || IS_IN_FLIGHT(tail_sent, value)));
        assert(BUG || !IS_IN_FLIGHT(head_sent, value))
    );
    EACH_ROW(FORGET(head[HALF_CELL(STAGING_HALF(EPOCH(r)), r, i, j)]));
    EACH_RANK(
        assert(BUG || i == r || IS_OF(SAID(r, i), EPOCH(r)));
        FORGET(SAID(r, i));
        WHEN(!BUG && i != r, CLEARED(r, i) = OLD)
    )
}

inline launch_combine() {
    for (j : 0 .. TOKENS - 1) {
        EACH_PART(WHEN(j < tokens[r] && dests[r * TOKENS + j],
            slots_awaited[(r * TOKENS + j) * PARTS + k] = dests[r * TOKENS + j];
            reducers_left[r]++));
        dests[r * TOKENS + j] = 0
    }
#if BUG == BUG_HEAD_MISCOUNTS
    tokens_before[r] = tokens[r];
#endif
    tokens[r] = 0;
    herald_clears[r] = 1;
    i = 0
}

inline send_partials() {
    EACH_ROW(WHEN(source[CELL(r, i, j)],
        EACH_PART(STORE(slot, slot_sent, PART(SLOT_HALF(dispatched[r]), i, r, j, k),
            row[CELL(r, i, j)]));
        WHEN(BUG != BUG_ROW_KEPT, row[CELL(r, i, j)] = 0; source[CELL(r, i, j)] = 0)))
}

/* From here on the places that this rank has emptied before this kernel can be stored into. */
#define CLEAN(cell) WHEN(cell == TAKEN, cell = 0)
#define CLEARED_TAILS (BUG == BUG_TAIL_LATE -> PREDECESSOR(dispatched[r]) : dispatched[r])
#define CLEARED_SLOTS (BUG == BUG_SLOT_LATE -> dispatched[r] : PREDECESSOR(dispatched[r]))
inline fence() {
    EACH_ROW(
        CLEAN(tail[HALF_CELL(STAGING_HALF(CLEARED_TAILS), r, i, j)]);
        EACH_PART(CLEAN(slot[PART(SLOT_HALF(CLEARED_SLOTS), r, i, j, k)])))
}

inline clear() {
    WHEN(BUG != BUG_CLEARANCE_EARLY, fence());
    EACH_RANK(WHEN(i != r,
        STORE_NOTE(clearance, clearance_sent, HALF_AT(ANNOUNCED_HALF(dispatched[r]), i, r),
            NOTE(dispatched[r], 0), SPOILS_CLEARANCES, ANNOUNCED_HALF(dispatched[r]), i)));
    WHEN(BUG != BUG_COUNTED_NEVER && BUG != BUG_COUNTED_ONCE,
        combined[r] = (BUG == BUG_COUNTED_TWICE -> SUCCESSOR(dispatched[r]) : dispatched[r]));
    herald_clears[r] = 0
}

inline end_combine() {
    (reducers_left[r] == 0 && !herald_clears[r]) || BUG == BUG_OVERLAP_DISPATCH;
    EACH_ROW(EACH_PART(
        value = PART(SLOT_HALF(dispatched[r]), r, i, j, k);
        assert(BUG || !(IS_NEWS(slot[value]) || IS_IN_FLIGHT(slot_sent, value)))))
}

/* Senders start whenever they like; where a store may be late in its place only, at once. */
#ifdef AT_ONCE
#define KERNEL(launch, send) atomic { launch; d_step { send } }
#else
#define KERNEL(launch, send) atomic { launch } d_step { send }
#endif
#define LAUNCH_COMBINE d_step { end_dispatch(); launch_combine() }
#ifdef TOGETHER
#define COMBINE KERNEL(LAUNCH_COMBINE, send_partials(); clear())
#elif defined(HERALD_LAST)
#define COMBINE KERNEL(LAUNCH_COMBINE, send_partials()) d_step { clear() }
#else
#define COMBINE \
    if \
    :: KERNEL(LAUNCH_COMBINE, clear()) d_step { send_partials() } \
    :: KERNEL(LAUNCH_COMBINE, send_partials()) d_step { clear() } \
    fi;
#endif
#if BUG == BUG_HERALD_UNPLACED
#define DISPATCH \
    KERNEL(launch_dispatch(), send_rows()) d_step { receivers_left[r] == 0; begin_step() }
#elif defined(TOGETHER)
#define DISPATCH KERNEL(launch_dispatch(), begin_step(); send_rows())
#elif defined(HERALD_LAST)
#define DISPATCH KERNEL(launch_dispatch(), send_rows()) d_step { begin_step() }
#else
#define DISPATCH \
    if \
    :: KERNEL(launch_dispatch(), begin_step()) d_step { send_rows() } \
    :: KERNEL(launch_dispatch(), send_rows()) d_step { begin_step() } \
    fi;
#endif

active [N] proctype stream() {
    byte r = _pid;

    do
    :: DISPATCH
#if BUG == BUG_CLEARANCE_EARLY
        d_step { fence() }
#endif
        COMBINE
        d_step { end_combine() }
#ifdef WATCHED
        WHEN(r == WATCHED, progress: skip)
#endif
    od
}

/* The reducers of a token: a thread, for each part of its slots, that waits for all its ranks. */
#define AWAITED(token, part) slots_awaited[(r * TOKENS + (token)) * PARTS + (part)]
#define IS_THERE(token, part, peer) \
    (!((AWAITED(token, part) >> (peer)) & 1) || \
        IS_NEWS(slot[PART(SLOT_HALF(dispatched[r]), r, peer, token, part)]) || \
        (BUG == BUG_SLOT_UNAWAITED && AWAITED(token, part) >> (peer) == 1))
#if N == 2
#define ARE_THERE(token, part) (IS_THERE(token, part, 0) && IS_THERE(token, part, 1))
#else
#define ARE_THERE(token, part) \
    (IS_THERE(token, part, 0) && IS_THERE(token, part, 1) && IS_THERE(token, part, 2))
#endif
#define REDUCE(token, part) \
    :: d_step { AWAITED(token, part) && ARE_THERE(token, part) -> take_slots(token, part) }

inline take_slots(token, part) {
    EACH_RANK(WHEN((AWAITED(token, part) >> i) & 1,
        value = PART(SLOT_HALF(dispatched[r]), r, i, token, part);
        assert(slot[value] == step[r] + 1);
        WHEN(BUG != BUG_SLOT_KEPT, slot[value] = TAKEN)));
    AWAITED(token, part) = 0;
    reducers_left[r]--
}

active [N] proctype reducers() {
    byte r = _pid - N;

    do
    REDUCE(0, 0)
#if PARTS == 2
    REDUCE(0, 1)
#endif
#if TOKENS == 2
    REDUCE(1, 0)
#if PARTS == 2
    REDUCE(1, 1)
#endif
#endif
    od
}

/* What a receiver on rank d sees of source s. */
#define IS_NONE(token) \
    (BUG != BUG_ANNOUNCEMENT_IGNORED && IS_TOLD(d, s) && (token) >= SAID_TOKENS(d, s))
#define HEAD(token) head[HALF_CELL(STAGING_HALF(EPOCH(d)), d, s, token)]
#define HAS_HEAD(token) (BUG == BUG_HEAD_UNDATED -> HEAD(token) != 0 : IS_OF(HEAD(token), EPOCH(d)))
#define IS_ABSENT(token) (HAS_HEAD(token) && !IS_LIVE(HEAD(token)))
#define TAIL(token) tail[HALF_CELL(STAGING_HALF(EPOCH(d)), d, s, token)]
#if BUG == BUG_HEAD_SUFFICES
#define HAS_TAIL(token) HAS_HEAD(token)
#elif BUG == BUG_ABSENT_UNSEEN
#define HAS_TAIL(token) IS_NEWS(TAIL(token))
#else
#define HAS_TAIL(token) (HAS_HEAD(token) && (IS_NEWS(TAIL(token)) || IS_ABSENT(token)))
#endif

#define THREADS(token) row_threads[CELL(d, s, token)]
/* Threads have done with a token, and as far as they know there are `count`. */
#if FIRST_TOKENS == TOKENS
#define GO_ON(token, threads, count) LEAVE(threads)
#else
#define GO_ON(token, threads, count) \
    if \
    :: (token) + 1 < TOKENS && (token) + 1 < (count) -> \
        row_threads[CELL(d, s, TOKENS - 1)] = row_threads[CELL(d, s, TOKENS - 1)] | (threads) \
    :: else -> LEAVE(threads) \
    fi
#endif
#define LEAVE(threads) receivers_left[d] = receivers_left[d] - (((threads) + 1) >> 1)

inline take_head(token) {
    WHEN(IS_LIVE(HEAD(token)), source[CELL(d, s, token)] = HEAD(token) & 7);
    THREADS(token) = THREADS(token) & ~POLLS_HEAD;
    GO_ON(token, POLLS_HEAD, COUNT_OF(HEAD(token)))
}

inline take_tail(token) {
    if
    :: IS_ABSENT(token) ->
        assert(!IS_NEWS(TAIL(token)));
        assert(!IS_IN_FLIGHT(tail_sent, HALF_CELL(STAGING_HALF(EPOCH(d)), d, s, token)))
    :: else ->
        assert(TAIL(token) == step[d] + 1);
        row[CELL(d, s, token)] = TAIL(token);
        WHEN(BUG != BUG_TAIL_KEPT, TAIL(token) = TAKEN)
    fi;
    THREADS(token) = THREADS(token) & ~POLLS_TAIL;
    GO_ON(token, POLLS_TAIL, COUNT_OF(HEAD(token)))
}

/* Where there is no such token, all threads that wait for it leave at the last one's time. */
inline take_nothing(token) {
    assert(BUG || !HAS_HEAD(token));
    value = THREADS(token);
    THREADS(token) = 0;
    LEAVE(value)
}

#define RECEIVE(token) \
    :: d_step { THREADS(token) && IS_NONE(token) -> take_nothing(token) } \
    :: d_step { (THREADS(token) & POLLS_HEAD) && HAS_HEAD(token) -> take_head(token) } \
    :: d_step { (THREADS(token) & POLLS_TAIL) && HAS_TAIL(token) -> take_tail(token) }

active [N * N] proctype receivers() {
    byte d = (_pid - 2 * N) / N, s = (_pid - 2 * N) % N;

    do
    RECEIVE(0)
#if TOKENS == 2
    RECEIVE(1)
#endif
    od
}
