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
    :: r == 0 || MOST > 0 -> tokens[r] = 1; choose_dests(0)
#if TOKENS == 2
    :: r == 0 || MOST > 1 -> tokens[r] = 2; choose_dests(0); choose_dests(1)
#endif
    fi
}

inline announce(epoch, count) {
    EACH_RANK(WHEN(i != r,
        STORE_NOTE(announcement, announcement_sent, HALF_AT(ANNOUNCED_HALF(epoch), i, r),
            NOTE(epoch, count), USES_ANNOUNCEMENTS, ANNOUNCED_HALF(epoch), i)))
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
#ifndef ANNOUNCED_EARLY
        assert(!is_ahead[r]);
        is_ahead[r] = 1;
        WHEN(ALL_RANKS(IS_AHEAD), EACH_RANK(is_ahead[i] = 0))
#endif
    }
#ifndef ANNOUNCED_EARLY
    choose_tokens();
#endif
    d_step {
        EACH_ROW(WHEN(i != r && j < FIRST_TOKENS,
            row_threads[CELL(r, i, j)] = POLLS_HEAD | POLLS_TAIL;
            receivers_left[r] = receivers_left[r] + 2));
        herald_runs[r] = 1;
        assert(BUG || EPOCH(r) == step[r])
    }
}

inline begin_step() {
#ifndef ANNOUNCED_EARLY
    WHEN(BUG != BUG_IDLE_SILENT || tokens[r] > 0, announce(EPOCH(r), tokens[r]));
#endif
    dispatched[r] = EPOCH(r)
}

#define STAGED(peer, token) HALF_CELL(STAGING_HALF(EPOCH(r)), peer, r, token)
#define SEND_HEAD(peer, token, live) \
    STORE_NOTE(head, head_sent, STAGED(peer, token), \
        NOTE(EPOCH(r), HEAD_SAYS(TOLD_TOKENS, live)), USES_HEADS, STAGING_HALF(EPOCH(r)), peer)
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

#define HAS_HEARD(peer) \
    ((peer) == r || BUG == BUG_HERALD_DEAF || \
        (BUG == BUG_HERALD_FORGETS && (peer) == (r + 1) % N) || IS_TOLD(r, peer))

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
        assert(BUG || !(tail[value] || IS_IN_FLIGHT(tail_sent, value)));
        assert(BUG || !IS_IN_FLIGHT(head_sent, value))
    );
    EACH_ROW(FORGET(head[HALF_CELL(STAGING_HALF(EPOCH(r)), r, i, j)]));
    EACH_RANK(
        assert(BUG || i == r || IS_OF(SAID(r, i), EPOCH(r)));
        FORGET(SAID(r, i))
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
#ifdef COMBINE_WAITS
    EACH_RANK(WHEN(i != r, run_awaited[AT(r, i)] = 1; reducers_left[r]++));
#endif
    i = 0
}

inline send_partials() {
    EACH_ROW(WHEN(source[CELL(r, i, j)],
        EACH_PART(STORE(slot, slot_sent, PART(i, r, j, k), row[CELL(r, i, j)]));
        WHEN(BUG != BUG_ROW_KEPT, row[CELL(r, i, j)] = 0; source[CELL(r, i, j)] = 0)));
#ifdef COMBINE_WAITS
    EACH_RANK(WHEN(i != r, STORE(running, running_sent, AT(i, r), step[r] + 1)));
#endif
    WHEN(BUG != BUG_COUNTED_NEVER && BUG != BUG_COUNTED_ONCE,
        combined[r] = (BUG == BUG_COUNTED_TWICE -> SUCCESSOR(dispatched[r]) : dispatched[r]))
}

inline end_combine() {
    reducers_left[r] == 0 || BUG == BUG_OVERLAP_DISPATCH;
    EACH_ROW(EACH_PART(
        value = PART(r, i, j, k);
        assert(BUG || (slot[value] == 0 && !IS_IN_FLIGHT(slot_sent, value)))))
}

/* What the kernel before should have done itself. */
inline empty_late() {
    EACH_ROW(
        WHEN(BUG == BUG_SLOT_LATE, EACH_PART(slot[PART(r, i, j, k)] = 0));
        WHEN(BUG == BUG_TAIL_LATE, tail[HALF_CELL(1 - STAGING_HALF(EPOCH(r)), r, i, j)] = 0))
}

/* Senders start whenever they like; where a store may be late in its place only, at once. */
#ifdef AT_ONCE
#define KERNEL(launch, send) atomic { launch; d_step { send } }
#else
#define KERNEL(launch, send) atomic { launch } d_step { send }
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

#ifdef ANNOUNCED_EARLY
    atomic { choose_tokens(); d_step { announce(1, tokens[r]) } }
#endif
    do
    :: DISPATCH
#if BUG == BUG_SLOT_LATE || BUG == BUG_TAIL_LATE
        d_step { empty_late() }
#endif
        KERNEL(d_step { end_dispatch(); launch_combine() }, send_partials())
#ifdef ANNOUNCED_EARLY
        atomic { choose_tokens(); d_step { announce(SUCCESSOR(dispatched[r]), tokens[r]) } }
#endif
        d_step { end_combine() }
#ifdef WATCHED
        WHEN(r == WATCHED, progress: skip)
#endif
    od
}

/* The reducers of a token: a thread, for each part of its slots, that waits for all its ranks. */
#define AWAITED(token, part) slots_awaited[(r * TOKENS + (token)) * PARTS + (part)]
#define IS_THERE(token, part, peer) \
    (!((AWAITED(token, part) >> (peer)) & 1) || slot[PART(r, peer, token, part)] || \
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
        assert(slot[PART(r, i, token, part)] == step[r] + 1);
        WHEN(BUG != BUG_SLOT_KEPT && BUG != BUG_SLOT_LATE, slot[PART(r, i, token, part)] = 0)));
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
#define HAS_TAIL(token) (TAIL(token) != 0)
#else
#define HAS_TAIL(token) (HAS_HEAD(token) && (TAIL(token) || IS_ABSENT(token)))
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
        assert(TAIL(token) == 0);
        assert(!IS_IN_FLIGHT(tail_sent, HALF_CELL(STAGING_HALF(EPOCH(d)), d, s, token)))
    :: else ->
        assert(TAIL(token) == step[d] + 1);
        row[CELL(d, s, token)] = TAIL(token);
        WHEN(BUG != BUG_TAIL_KEPT && BUG != BUG_TAIL_LATE, TAIL(token) = 0)
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
#ifdef COMBINE_WAITS
    :: d_step { run_awaited[AT(d, s)] && running[AT(d, s)] ->
            assert(running[AT(d, s)] == step[d] + 1); running[AT(d, s)] = 0;
            run_awaited[AT(d, s)] = 0; reducers_left[d]-- }
#endif
    od
}
