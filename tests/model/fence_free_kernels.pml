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
        EACH_RANK(WHEN(i != r,
            START_SOURCE(AT(r, i));
            for (j : 0 .. TOKENS - 1) { row_threads[CELL(r, i, j)] = ALL_THREADS }
            dispatch_left[r] = dispatch_left[r] + TOKENS));
        epoch = EPOCH(r);
        assert(BUG || epoch == step[r])
    }
}

#define STAGED(peer, token) HALF_CELL(STAGING_HALF(epoch), peer, r, token)
#define SEND_HEAD(peer, token, what) \
    STORE_NOTE(head, head_sent, STAGED(peer, token), NOTE(epoch, what), \
        USES_HEADS, STAGING_HALF(epoch), peer)

inline send_rows() {
#ifndef ANNOUNCED_EARLY
    WHEN(BUG != BUG_IDLE_SILENT || tokens[r] > 0, announce(epoch, tokens[r]));
#endif
    EACH_ROW(WHEN(i != r && j < tokens[r],
        if
        :: (dests[r * TOKENS + j] >> i) & 1 ->
            SEND_HEAD(i, j, LIVE);
            STORE(tail, tail_sent, STAGED(i, j), step[r] + 1)
        :: else -> WHEN(BUG != BUG_ABSENT_UNSENT, SEND_HEAD(i, j, 0))
        fi));
    dispatched[r] = epoch
}

#ifdef EMPTIED_HEADS
#define IS_HEAD_TAKEN(at) (head[at] == 0 && !IS_IN_FLIGHT(head_sent, at))
#define FORGET_HEAD(at) skip
#else
#define FORGET_HEAD(at) FORGET(head[at])
#define IS_HEAD_TAKEN(at) (!IS_IN_FLIGHT(head_sent, at))
#endif
#define IS_TAIL_TAKEN(at) (tail[at] == 0 && !IS_IN_FLIGHT(tail_sent, at))

inline end_dispatch() {
    dispatch_left[r] == 0 || BUG == BUG_OVERLAP_COMBINE;
    EACH_ROW(
        /* The experts find nothing early, of another step, or that the count does not tell. */
        value = row[CELL(r, i, j)];
        assert(value == source[CELL(r, i, j)]);
        assert(value == 0 || (value == step[r] + 1 && j < counts[AT(r, i)]));
        /* Nothing is lost: what was sent to here in this step has arrived and was taken. */
        value = HALF_CELL(STAGING_HALF(epoch), r, i, j);
        assert(BUG || (IS_HEAD_TAKEN(value) && IS_TAIL_TAKEN(value)));
        FORGET_HEAD(value)
    );
    EACH_RANK(
        counts[AT(r, i)] = 0;
        value = HALF_AT(ANNOUNCED_HALF(epoch), r, i);
        assert(BUG || i == r || IS_OF(announcement[value], epoch));
        FORGET(announcement[value])
    );
    epoch = 0
}

inline launch_combine() {
    for (j : 0 .. TOKENS - 1) {
        EACH_PART(WHEN(j < tokens[r] && dests[r * TOKENS + j],
            slots_awaited[(r * TOKENS + j) * PARTS + k] = dests[r * TOKENS + j];
            combine_left[r]++));
        dests[r * TOKENS + j] = 0
    }
    tokens[r] = 0;
#ifdef COMBINE_WAITS
    EACH_RANK(WHEN(i != r, run_awaited[AT(r, i)] = 1; combine_left[r]++));
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
    combine_left[r] == 0 || BUG == BUG_OVERLAP_DISPATCH;
    EACH_ROW(EACH_PART(
        value = PART(r, i, j, k);
        assert(BUG || (slot[value] == 0 && !IS_IN_FLIGHT(slot_sent, value)))))
}

/* What the kernel before should have done itself. */
inline empty_late() {
    EACH_ROW(
        WHEN(BUG == BUG_SLOT_LATE, EACH_PART(slot[PART(r, i, j, k)] = 0));
        WHEN(BUG == BUG_TAIL_LATE, tail[HALF_CELL(1 - STAGING_HALF(epoch), r, i, j)] = 0))
}

/* Senders start whenever they like; where a store may be late in its place only, at once. */
#ifdef AT_ONCE
#define KERNEL(launch, send) atomic { launch; d_step { send } }
#else
#define KERNEL(launch, send) atomic { launch } d_step { send }
#endif

active [N] proctype stream() {
    byte r = _pid;
    /* What a sender has read when it starts. */
    byte epoch;

#ifdef ANNOUNCED_EARLY
    atomic { choose_tokens(); d_step { announce(1, tokens[r]) } }
#endif
    do
    :: KERNEL(launch_dispatch(), send_rows())
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
    combine_left[r]--
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

/* What a thread of dispatch on rank d sees of source s. */
#define SAID announcement[HALF_AT(ANNOUNCED_HALF(EPOCH(d)), d, s)]
#define IS_IDLE (BUG == BUG_IDLE_RECEIVES_NOT && tokens[d] == 0)
#define IS_TOLD \
    ((BUG == BUG_ANNOUNCEMENT_UNDATED -> SAID != 0 : IS_OF(SAID, EPOCH(d))) || IS_IDLE || \
        (BUG == BUG_IDLE_UNAWAITED && s != 0))
#define SAID_TOKENS (IS_IDLE -> 0 : SAYS(SAID))
#ifdef ROWS_UNTOLD
#define IS_ROW_TOLD(token) true
#else
#define IS_ROW_TOLD(token) (IS_TOLD && (token) < SAID_TOKENS)
#endif
#define HEAD(token) head[HALF_CELL(STAGING_HALF(EPOCH(d)), d, s, token)]
#if defined(EMPTIED_HEADS) || BUG == BUG_HEAD_UNDATED
#define HAS_HEAD(token) (HEAD(token) != 0)
#else
#define HAS_HEAD(token) IS_OF(HEAD(token), EPOCH(d))
#endif
#define IS_ABSENT(token) (HAS_HEAD(token) && SAYS(HEAD(token)) != LIVE)
#define TAIL(token) tail[HALF_CELL(STAGING_HALF(EPOCH(d)), d, s, token)]
#if BUG == BUG_HEAD_SUFFICES
#define HAS_TAIL(token) HAS_HEAD(token)
#elif BUG == BUG_ABSENT_UNSEEN
#define HAS_TAIL(token) (TAIL(token) != 0)
#elif defined(TAIL_SUFFICES)
#define HAS_TAIL(token) (TAIL(token) || IS_ABSENT(token))
#else
#define HAS_TAIL(token) (HAS_HEAD(token) && (TAIL(token) || IS_ABSENT(token)))
#endif

#define THREADS(token) row_threads[CELL(d, s, token)]
#define LEAVE(token, threads) \
    THREADS(token) = THREADS(token) & ~(threads); \
    WHEN(THREADS(token) == 0, dispatch_left[d]--)

inline take_head(token) {
    WHEN(!IS_ABSENT(token), source[CELL(d, s, token)] = HEAD(token) & 7);
    LEAVE(token, POLLS_HEAD)
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
    KEEP_COUNT(token);
    LEAVE(token, POLLS_TAIL)
}

/* Where there is no such token, all threads leave at the last one's time. */
#define RECEIVE(token) \
    :: d_step { THREADS(token) == ALL_THREADS && IS_TOLD && (token) >= SAID_TOKENS -> \
            KEEP_COUNT(token); LEAVE(token, ALL_THREADS) } \
    :: d_step { (THREADS(token) & POLLS_HEAD) && IS_ROW_TOLD(token) && HAS_HEAD(token) -> \
            take_head(token) } \
    :: d_step { (THREADS(token) & POLLS_TAIL) && IS_ROW_TOLD(token) && HAS_TAIL(token) -> \
            take_tail(token) } \
    EMPTY_HEAD(token)
#ifdef EMPTIED_HEADS
/* All threads of a row look at the head: the one that holds it empties it after they have met. */
#define LOOK_AT_HEAD (BUG == BUG_HEAD_EARLY -> POLLS_HEAD : POLLS_HEAD | POLLS_TAIL)
#define EMPTY_HEAD(token) \
    :: d_step { (THREADS(token) & HOLDS_HEAD) && !(THREADS(token) & LOOK_AT_HEAD) -> \
            HEAD(token) = 0; LEAVE(token, HOLDS_HEAD) }
#else
#define EMPTY_HEAD(token)
#endif

active [N * N] proctype receivers() {
    byte d = (_pid - 2 * N) / N, s = (_pid - 2 * N) % N;

    do
    RECEIVE(0)
#ifdef ROWS_UNTOLD
    :: d_step { source_thread[AT(d, s)] && IS_TOLD ->
            counts[AT(d, s)] = SAID_TOKENS; source_thread[AT(d, s)] = 0; dispatch_left[d]-- }
#endif
#if TOKENS == 2
    RECEIVE(1)
#endif
#ifdef COMBINE_WAITS
    :: d_step { run_awaited[AT(d, s)] && running[AT(d, s)] ->
            assert(running[AT(d, s)] == step[d] + 1); running[AT(d, s)] = 0;
            run_awaited[AT(d, s)] = 0; combine_left[d]-- }
#endif
    od
}
