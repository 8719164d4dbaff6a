/*
 * Synchronization of the flag protocol (docs/protocol.md): N ranks dispatch and combine for ever.
 *
 * A rank is a stream of kernels, a kernel one or two CTAs, each CTA a process. A store stays in
 * flight until its `link` lands it, in any order and however late; only a fence waits until what
 * its CTA has made and acquired has landed. The end of a kernel orders the next one after it, but
 * lands nothing. A rank sees its own stores at once, the others see them when they land.
 *
 * Every store carries the parity of its step; `launch_dispatch` asserts that no rank is two steps
 * ahead of another, so the parity names one step. What is not in the kernels: a reader empties a
 * slot, so that overwriting an unread one shows.
 *
 *   N         ranks, 2 or 3
 *   TOKENS    most tokens of a rank, 1 or 2: any T from 0 on, chosen anew in each step
 *   MOST      the same for the ranks but 0, if that is fewer
 *   ROUTES    1: a token goes to all other ranks; 2: or to the next one alone; 3: or to none
 *   EXTREMES  payload lands at once or when a fence forces it, lowered flags and emptied rows when
 *             a fence forces it, raised flags at once. One rank reads a store, and every assertion
 *             on it fails at one of these times if it fails at any: so this is enough.
 *   WATCHED   the rank whose steps are progress
 *
 * Variants that hold, too: NO_OWN_FLAG (nobody raises the own flag), THREAD_FENCES (every CTA
 * fences, and an arrival hands nothing over), LATE_LOWER (flags are lowered by the kernel after
 * the one that saw them, so that nobody counts departures).
 * BUG is one of those below: each breaks one rule.
 */
#ifndef BUG
#define BUG 0
#endif
#define BUG_COMBINE_FIRST_ARRIVAL 1 /* the first CTA of combine to arrive raises the flag */
#define BUG_COMBINE_NOT_LOWERED 2
#define BUG_COMBINE_NO_FENCE 3 /* none before the flag */
#define BUG_DISPATCH_FIRST_ARRIVAL 4
#define BUG_DISPATCH_NOT_LOWERED 5
#define BUG_DISPATCH_NO_FENCE 6
#define BUG_EMPTIED_AFTER_FLAG 7 /* rows are made empty after combine's flag */
#define BUG_FIRST_DEPARTURE 8 /* the first CTA that has seen combine's flags lowers them */
#define BUG_FLAGS_NOT_FENCED 9 /* a fence orders payload alone */
#define BUG_IDLE_COMBINE 10 /* a rank without tokens does not wait */
#define BUG_IDLE_DISPATCH 11
#define BUG_NOT_RESIDENT 12 /* a CTA of combine waits for another one's place */
#define BUG_NO_ACQUIRE 13 /* slots are read before the flags are seen */
#define BUG_OVERLAP 14 /* the next dispatch starts when one CTA of combine has ended */
#define BUG_PAYLOAD_NOT_FENCED 15 /* a fence orders flags alone */
#define BUG_RELAXED_ARRIVAL 16 /* an arrival hands over nothing of its CTA */
#ifndef MOST
#define MOST TOKENS
#endif
#ifndef ROUTES
#define ROUTES 1
#endif
#define CTAS 2

#define AT(owner, peer) ((owner) * N + (peer))
#define CELL(owner, peer, token) (AT(owner, peer) * TOKENS + (token))
#define OTHERS(rank) (((1 << N) - 1) ^ (1 << (rank)))
/* Which CTA of combine on `rank` sends a row: by token, or else by source. */
#if TOKENS == 2
#define SENDER(rank, peer, token) (token)
#else
#define SENDER(rank, peer, token) (((peer) > (rank) -> (peer) - 1 : (peer)) % CTAS)
#endif

/* Memory of the owner: parity + 1, or 0 for empty and lowered. A dispatch flag tells T, too. */
byte row[N * N * TOKENS], slot[N * N * TOKENS];
byte dispatch_flag[N * N], combine_flag[N * N];
/* In flight: what the peer stores there, and the owner's own rows made empty, flags lowered. */
byte row_sent[N * N * TOKENS], slot_sent[N * N * TOKENS];
byte dispatch_raised[N * N], combine_raised[N * N];
bit row_emptied[N * N * TOKENS], dispatch_lowered[N * N], combine_lowered[N * N];
/* How many of these each CTA has made, and how many flags each rank. */
byte payload[N * CTAS], signals[N];

/* A rank's control words and the arguments of its next kernel. */
bit parity[N], is_ahead[N];
byte tokens[N], dests[N * TOKENS], counts[N * N];
byte dispatch_arrivals[N], combine_arrivals[N], departures[N];
byte dispatch_left[N], combine_left[N];
bit dispatch_starts[N * CTAS], combine_starts[N * CTAS];

hidden byte i, j, value;

#define IS_SEEN(flag, lowered, peer) (flag[AT(r, peer)] && !lowered[AT(r, peer)])
#ifdef NO_OWN_FLAG
#define IS_TOLD(peer) (peer != r)
#else
#define IS_TOLD(peer) true
#endif
#define IS_UP(flag, lowered, peer) (!IS_TOLD(peer) || IS_SEEN(flag, lowered, peer))
#if N == 2
#define ALL_UP(f, l) (IS_UP(f, l, 0) && IS_UP(f, l, 1))
#define ALL_AHEAD (is_ahead[0] && is_ahead[1])
#else
#define ALL_UP(f, l) (IS_UP(f, l, 0) && IS_UP(f, l, 1) && IS_UP(f, l, 2))
#define ALL_AHEAD (is_ahead[0] && is_ahead[1] && is_ahead[2])
#endif

/* Nothing is overwritten before it was read and made empty, or lowered: not even unseen. */
#define PUT(place, at, what) assert(place[at] == 0); place[at] = what
#define LAND(place, sent, at) PUT(place, at, sent[at]); sent[at] = 0

#define WHEN(condition, action) if :: condition -> action :: else fi
/* A d_step must not end in a loop: hence the last assignment. */
#define EACH_RANK(...) for (i : 0 .. N - 1) { __VA_ARGS__ } i = 0
#define EACH_ROW(...) EACH_RANK(for (j : 0 .. TOKENS - 1) { __VA_ARGS__ })
#define COUNT_IN(counter, limit) before = counter[r]; counter[r] = (before + 1) % (limit)

/* What a fence of this CTA orders: payload of which CTAs, and the rank's flags. */
#ifdef THREAD_FENCES
#define IS_ACQUIRED(cta) ((cta) == c)
#else
#define IS_ACQUIRED(cta) \
    (BUG != BUG_PAYLOAD_NOT_FENCED && (BUG != BUG_RELAXED_ARRIVAL || (cta) == c))
#endif
#define ORDERS_FLAGS (BUG != BUG_FLAGS_NOT_FENCED)
#ifdef EXTREMES
#define CHOOSE_LATE if :: late = 0 :: late = 1 fi
#define STORE(place, sent, at, what) \
    if \
    :: late -> assert(sent[at] == 0); sent[at] = what \
    :: else -> PUT(place, at, what) \
    fi
#define STORE_FLAG(place, sent, at, what) PUT(place, at, what)
#define FENCE land()
#else
#define CHOOSE_LATE skip
#define STORE(place, sent, at, what) \
    assert(sent[at] == 0); sent[at] = what; payload[r * CTAS + c]++
#define STORE_FLAG(place, sent, at, what) assert(sent[at] == 0); sent[at] = what; signals[r]++
#define FENCE \
    (!IS_ACQUIRED(0) || payload[r * CTAS] == 0) && \
    (!IS_ACQUIRED(1) || payload[r * CTAS + 1] == 0) && (!ORDERS_FLAGS || signals[r] == 0)
#endif
#ifdef THREAD_FENCES
#define THREAD_FENCE FENCE
#else
#define THREAD_FENCE skip
#endif

#define RAISE(flag, raised, what) \
    EACH_RANK(WHEN(IS_TOLD(i), STORE_FLAG(flag, raised, AT(i, r), what)))
#define LOWER(flag, lowered) \
    EACH_RANK(WHEN(IS_SEEN(flag, lowered, i), lowered[AT(r, i)] = 1; signals[r]++))
#ifdef LATE_LOWER
#define LOWER_AFTER(condition, flag, lowered) skip
#define LOWER_BEFORE(flag, lowered) WHEN(c == 0, LOWER(flag, lowered))
#else
#define LOWER_AFTER(condition, flag, lowered) WHEN(condition, LOWER(flag, lowered))
#define LOWER_BEFORE(flag, lowered) skip
#endif

/* Which of a kernel's arrivals or departures acts for all; `before` is 0 in the first one. */
#define SPEAKS_IN_DISPATCH (before == (BUG == BUG_DISPATCH_FIRST_ARRIVAL -> 0 : ctas - 1))
#define SPEAKS_IN_COMBINE (before == (BUG == BUG_COMBINE_FIRST_ARRIVAL -> 0 : CTAS - 1))
#define LOWERS_DISPATCH (BUG != BUG_DISPATCH_NOT_LOWERED)
#define LOWERS_COMBINE \
    (BUG != BUG_COMBINE_NOT_LOWERED && before == (BUG == BUG_FIRST_DEPARTURE -> 0 : waiting - 1))
#define WAITS_IN_DISPATCH (BUG != BUG_IDLE_DISPATCH || T > 0)
#define WAITS_IN_COMBINE (BUG != BUG_IDLE_COMBINE || T > 0)
#define COMBINE_LEFT (BUG == BUG_OVERLAP -> 1 : 0)
#define IS_RESIDENT (BUG != BUG_NOT_RESIDENT || c == 0 || combine_left[r] == 1)

inline choose_dests(token) {
    if
    :: dests[r * TOKENS + token] = OTHERS(r)
#if ROUTES > 1
    :: dests[r * TOKENS + token] = 1 << ((r + 1) % N)
#endif
#if ROUTES > 2
    :: dests[r * TOKENS + token] = 0
#endif
    fi
}

inline launch_dispatch() {
    d_step {
        parity[r] = 1 - parity[r];
        assert(!is_ahead[r]);
        is_ahead[r] = 1;
        WHEN(ALL_AHEAD, EACH_RANK(is_ahead[i] = 0));
        for (i : 0 .. TOKENS - 1) { dests[r * TOKENS + i] = 0 }
        i = 0
    }
    if
    :: tokens[r] = 0
    :: tokens[r] = 1; choose_dests(0)
#if TOKENS == 2
    :: r == 0 || MOST == 2 -> tokens[r] = 2; choose_dests(0); choose_dests(1)
#endif
    fi;
    d_step {
        dispatch_left[r] = (tokens[r] == 2 -> 2 : 1);
        dispatch_starts[r * CTAS] = 1;
        dispatch_starts[r * CTAS + 1] = (tokens[r] == 2)
    }
}

/* The experts read the rows between the kernels; then combine may start. */
inline launch_combine() {
    /* Nothing early, nothing of another step, nothing that the count does not tell. */
    EACH_ROW(
        value = (row_emptied[CELL(r, i, j)] -> 0 : row[CELL(r, i, j)]);
        assert(value == 0 || (value == parity[r] + 1 && j < counts[AT(r, i)]))
    );
    combine_left[r] = combine_left[r] + CTAS;
    combine_starts[r * CTAS] = 1;
    combine_starts[r * CTAS + 1] = 1
}

inline send_rows() {
    EACH_RANK(WHEN(c < T && ((dests[r * TOKENS + c] >> i) & 1),
        STORE(row, row_sent, CELL(i, r, c), tag + 1)))
}

#define EMPTY_ROW(at) row_emptied[at] = 1; payload[r * CTAS + c]++
#if BUG == BUG_EMPTIED_AFTER_FLAG
#define EMPTY_SENT_ROW(at) skip
#else
#define EMPTY_SENT_ROW(at) EMPTY_ROW(at)
#endif

inline send_partials() {
    EACH_ROW(
        value = (row_emptied[CELL(r, i, j)] -> 0 : row[CELL(r, i, j)]);
        WHEN(SENDER(r, i, j) == c && j < counts[AT(r, i)] && value,
            assert(value == tag + 1);
            STORE(slot, slot_sent, CELL(i, r, j), tag + 1);
            EMPTY_SENT_ROW(CELL(r, i, j)))
    )
}

inline empty_rows() {
    EACH_ROW(WHEN(SENDER(r, i, j) == c && row[CELL(r, i, j)], EMPTY_ROW(CELL(r, i, j))))
}

inline read_slots() {
    EACH_RANK(WHEN(c < T && ((mask >> i) & 1),
        assert(slot[CELL(r, i, c)] == tag + 1); slot[CELL(r, i, c)] = 0))
}

inline read_dispatch_flags() {
    EACH_RANK(WHEN(IS_TOLD(i) && WAITS_IN_DISPATCH,
        assert(dispatch_flag[AT(r, i)] >> 2 == tag);
        counts[AT(r, i)] = (dispatch_flag[AT(r, i)] & 3) - 1))
}

inline read_combine_flags() {
    EACH_RANK(WHEN(IS_TOLD(i) && WAITS_IN_COMBINE, assert(combine_flag[AT(r, i)] == tag + 1)))
}

/* An own store lands. */
#define CLEAR(place, cleared, at) cleared[at] = 0; place[at] = 0

#ifdef EXTREMES
/* What a fence does where nothing else lands what is late. */
inline land() {
    EACH_ROW(
        WHEN(row_sent[CELL(i, r, j)] && IS_ACQUIRED(j), LAND(row, row_sent, CELL(i, r, j)));
        WHEN(slot_sent[CELL(i, r, j)] && IS_ACQUIRED(SENDER(r, i, j)),
            LAND(slot, slot_sent, CELL(i, r, j)));
        WHEN(row_emptied[CELL(r, i, j)] && IS_ACQUIRED(SENDER(r, i, j)),
            CLEAR(row, row_emptied, CELL(r, i, j)); payload[r * CTAS + SENDER(r, i, j)]--)
    );
    EACH_RANK(WHEN(dispatch_lowered[AT(r, i)] && ORDERS_FLAGS,
        CLEAR(dispatch_flag, dispatch_lowered, AT(r, i)); signals[r]--));
    EACH_RANK(WHEN(combine_lowered[AT(r, i)] && ORDERS_FLAGS,
        CLEAR(combine_flag, combine_lowered, AT(r, i)); signals[r]--))
}
#endif

active [N * CTAS] proctype cta() {
    byte r = _pid / CTAS, c = _pid % CTAS;
    /* Arguments of the kernel, and what the CTA has learnt in it. */
    byte tag, T, mask, ctas, waiting, before;
    bit late;

    atomic { WHEN(c == 0, launch_dispatch()) }
    do
    :: atomic {
            dispatch_starts[r * CTAS + c] ->
            CHOOSE_LATE;
            d_step {
                dispatch_starts[r * CTAS + c] = 0;
                tag = parity[r];
                T = tokens[r];
                ctas = (T == 2 -> 2 : 1);
                LOWER_BEFORE(combine_flag, combine_lowered);
                send_rows();
                late = 0
            }
        }
        d_step { THREAD_FENCE; COUNT_IN(dispatch_arrivals, ctas) }
        if
        :: SPEAKS_IN_DISPATCH ->
            d_step {
#if BUG != BUG_DISPATCH_NO_FENCE
                FENCE;
#endif
                RAISE(dispatch_flag, dispatch_raised, ((tag << 2) | (T + 1)))
            }
            d_step {
                ALL_UP(dispatch_flag, dispatch_lowered) || !WAITS_IN_DISPATCH;
                read_dispatch_flags();
                LOWER_AFTER(LOWERS_DISPATCH, dispatch_flag, dispatch_lowered)
            }
        :: else
        fi;
        d_step {
            tag = 0; T = 0; ctas = 0; before = 0;
            dispatch_left[r]--;
            WHEN(dispatch_left[r] == 0, launch_combine())
        }
    :: atomic {
            combine_starts[r * CTAS + c] && IS_RESIDENT ->
            CHOOSE_LATE;
            d_step {
                combine_starts[r * CTAS + c] = 0;
                tag = parity[r];
                T = tokens[r];
                mask = (c < TOKENS -> dests[r * TOKENS + c] : 0);
                waiting = (T == 2 -> 2 : 1);
                LOWER_BEFORE(dispatch_flag, dispatch_lowered);
                send_partials();
                late = 0
            }
        }
        d_step { THREAD_FENCE; COUNT_IN(combine_arrivals, CTAS) }
        if
        :: SPEAKS_IN_COMBINE ->
            d_step {
#if BUG != BUG_COMBINE_NO_FENCE
                FENCE;
#endif
                RAISE(combine_flag, combine_raised, tag + 1)
            }
        :: else
        fi;
#if BUG == BUG_EMPTIED_AFTER_FLAG
        d_step { empty_rows() }
#endif
        if
        :: c < waiting ->
#if BUG == BUG_NO_ACQUIRE
            d_step { read_slots() }
#endif
            d_step {
                ALL_UP(combine_flag, combine_lowered) || !WAITS_IN_COMBINE;
                read_combine_flags();
                COUNT_IN(departures, waiting)
            }
#if BUG != BUG_NO_ACQUIRE
            d_step { read_slots() }
#endif
        :: else -> before = CTAS
        fi;
        atomic {
            d_step {
                LOWER_AFTER(LOWERS_COMBINE, combine_flag, combine_lowered);
                tag = 0; T = 0; mask = 0; waiting = 0; before = 0;
                combine_left[r]--
            }
            WHEN(combine_left[r] == COMBINE_LEFT, launch_dispatch())
        }
#ifdef WATCHED
        WHEN(r == WATCHED && c == 0, progress: skip)
#endif
    od
}

#ifndef EXTREMES
#define LAND_PAYLOAD(token) \
    :: d_step { row_sent[CELL(d, s, token)] -> \
            LAND(row, row_sent, CELL(d, s, token)); payload[s * CTAS + token]-- } \
    :: d_step { slot_sent[CELL(d, s, token)] -> \
            LAND(slot, slot_sent, CELL(d, s, token)); payload[s * CTAS + SENDER(s, d, token)]-- } \
    :: d_step { row_emptied[CELL(d, s, token)] -> \
            CLEAR(row, row_emptied, CELL(d, s, token)); payload[d * CTAS + SENDER(d, s, token)]-- }

/* Memory of rank d: what rank s stores there, and what d itself does to the places of s. */
active [N * N] proctype link() {
    byte d = (_pid - N * CTAS) / N, s = (_pid - N * CTAS) % N;

    do
    :: d_step { dispatch_raised[AT(d, s)] ->
            LAND(dispatch_flag, dispatch_raised, AT(d, s)); signals[s]-- }
    :: d_step { combine_raised[AT(d, s)] ->
            LAND(combine_flag, combine_raised, AT(d, s)); signals[s]-- }
    :: d_step { dispatch_lowered[AT(d, s)] ->
            CLEAR(dispatch_flag, dispatch_lowered, AT(d, s)); signals[d]-- }
    :: d_step { combine_lowered[AT(d, s)] ->
            CLEAR(combine_flag, combine_lowered, AT(d, s)); signals[d]-- }
    LAND_PAYLOAD(0)
#if TOKENS == 2
    LAND_PAYLOAD(1)
#endif
    od
}
#endif
