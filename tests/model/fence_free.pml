/*
 * Synchronization of the fence-free protocol: N ranks dispatch and combine for ever.
 *
 * A rank is a stream of kernels. Its senders never wait: they make their stores in one step at any
 * time in the kernel, as a store may be in flight for long anyway. So do the heralds, dispatch's
 * with its announcements and combine's with its clearances, before or after them. Receivers and
 * reducers are threads that each poll, act once and go on or leave; the kernel ends when all have
 * left and the herald has heard all ranks, and only then the next one starts. What a thread stores
 * in another rank's memory is in flight until a `link` lands it, in any order and however late:
 * nothing waits for it but threads that poll there, and the end of a kernel lands nothing. What it
 * stores in the memory of its own rank is there at once for the kernels after it, so a late store
 * is no more than a late thread. But for the stores of other ranks a place that was made empty is
 * only TAKEN until a fence of a later kernel, which is the clearance's: what lands there sooner may
 * be lost, however many kernels have ended since.
 *
 * A thread polls several places with one load each. All that it waits for stays as it is until
 * the thread has left, which is asserted, so that looking at them in one step is no restriction.
 * Nor is it that the herald hears all at once, when the kernel ends: nobody sees before what it has
 * heard.
 *
 * Every store carries its step, modulo STEPS: `launch_dispatch` asserts that no rank is two steps
 * ahead of another, a store that nothing is in flight to its place, and the end of a kernel that
 * all of its step has arrived and was taken. So 2 is enough, and 4 tells more about what is wrong.
 * Left out: a rank's own rows and partials, which no other rank sees, and waits that time out.
 *
 *   N         ranks, 2 or 3
 *   TOKENS    most tokens of a rank, 1 or 2: any T from 0 on, each to any set of the other ranks,
 *             chosen anew in each step
 *   MOST      the same for the ranks but 0, if that is fewer
 *   SENDERS   ranks that have tokens, if not all
 *   PARTS     chunks of a slot, 1 or 2; a row has two: its head, and a tail for all others
 *   SPREAD    a source's tokens have receivers each, where otherwise one goes from token to token
 *   STEPS     4, or 2 for less to remember
 *   AT_ONCE   stores land at once. A place is read by threads that wait for it, and what they wait
 *             for stays, so that they may be late instead of the stores. A store that no thread
 *             waits for is found when the kernel ends. (A thread that takes what it should not
 *             while only a part of a step has landed is found with links alone.)
 *   TOGETHER  the heralds act in the step of the senders: the links alone set them apart
 *   WATCHED   the rank whose steps are progress
 *
 * Variants that hold, too: HERALD_LAST (they act after the senders, never before),
 * HEADS_OVERSTATE (a head tells more tokens than there are: only fewer would be wrong).
 * BUG is one of those below: each breaks one rule.
 */
#ifndef BUG
#define BUG 0
#endif
#define BUG_ABSENT_UNSEEN 1 /* a thread of the tail does not look at the head */
#define BUG_ABSENT_UNSENT 2 /* a token's head goes to the chosen ranks alone */
#define BUG_ANNOUNCEMENT_IGNORED 3 /* receivers look at heads alone */
#define BUG_ANNOUNCEMENT_TORN 4 /* two stores: the epoch may land before T */
#define BUG_ANNOUNCEMENT_UNDATED 5 /* whatever was announced is taken */
#define BUG_CLEARANCE_EARLY 28 /* it is given before the fence, which the next dispatch makes up for */
#define BUG_CLEARANCE_UNHEARD 30 /* dispatch ends without it */
#define BUG_COUNTED_NEVER 6 /* combine does not store its epoch, so all are 1 */
#define BUG_COUNTED_ONCE 7 /* one control word: late threads find it counted up by their kernel */
#define BUG_COUNTED_TWICE 8 /* both kernels count up, so that the parity stays */
#define BUG_HEAD_MISCOUNTS 9 /* it tells the T of the step before */
#define BUG_HEAD_SUFFICES 10 /* the tail is taken when the head has arrived */
#define BUG_HEAD_UNDATED 11 /* any head is taken: the one of two steps ago is still there */
#define BUG_HERALD_DEAF 12 /* it announces and leaves, and the kernel ends without it */
#define BUG_HERALD_FORGETS 13 /* it does not wait for one of the ranks */
#define BUG_HERALD_UNPLACED 14 /* it does not run before the receivers have left */
#define BUG_IDLE_RECEIVES_NOT 15 /* a rank without tokens announces and leaves */
#define BUG_IDLE_SILENT 16 /* a rank without tokens announces nothing */
#define BUG_IDLE_UNAWAITED 17 /* rank 0 alone has tokens, and so does not wait for the others */
#define BUG_ONE_ANNOUNCEMENT 18 /* without parity */
#define BUG_ONE_SLOT 31 /* without parity */
#define BUG_ONE_STAGING 19 /* without parity */
#define BUG_OVERLAP_COMBINE 20 /* combine starts before dispatch's threads have left */
#define BUG_OVERLAP_DISPATCH 21 /* the next dispatch starts before combine's threads have left */
#define BUG_ROW_KEPT 22 /* combine does not make a row empty */
#define BUG_SLOT_KEPT 23 /* a slot is not emptied */
#define BUG_SLOT_LATE 24 /* it is emptied by the next combine, beside its fence */
#define BUG_SLOT_UNAWAITED 25 /* a reducer does not wait for a token's last rank */
#define BUG_TAIL_KEPT 26 /* a tail is not emptied */
#define BUG_TAIL_LATE 27 /* it is emptied by combine, beside its fence */
#if BUG == BUG_IDLE_UNAWAITED
#undef MOST
#define MOST 0
#endif
#ifndef MOST
#define MOST TOKENS
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef SENDERS
#define SENDERS N
#endif

#define AT(owner, peer) ((owner) * N + (peer))
#define CELL(owner, peer, token) (AT(owner, peer) * TOKENS + (token))
#define HALF_AT(half, owner, peer) ((half) * N * N + AT(owner, peer))
#define HALF_CELL(half, owner, peer, token) ((half) * N * N * TOKENS + CELL(owner, peer, token))
#define PART(half, owner, peer, token, part) \
    (HALF_CELL(half, owner, peer, token) * PARTS + (part))

/*
 * Memory of the owner, written by the peer: step + 1, or 0 for empty, or TAKEN. Heads and what
 * heralds say are notes: many threads read them and none empties them, so they have an epoch + 1
 * and what they say, which is T, and in heads LIVE, too (or not: the token has no expert here).
 */
#define NOTE(epoch, what) (((what) << 3) | ((epoch) + 1))
#define IS_OF(note, epoch) (((note) & 7) == (epoch) + 1)
#define SAYS(note) ((note) >> 3)
#define LIVE 1
#define TAKEN 8
#define IS_NEWS(cell) ((cell) != 0 && (cell) != TAKEN)
#define HEAD_SAYS(count, live) (((count) << 1) | (live))
#define IS_LIVE(note) (SAYS(note) & LIVE)
#define COUNT_OF(note) (SAYS(note) >> 1)
/* An epoch that nobody looks for. The real ones do not come round, so when a dispatch has ended all
 * that it could take is that. */
#define OLD 7
#if BUG
#define AT_FIRST 0
#define FORGOTTEN(note) ((note) | OLD)
#else
#define AT_FIRST OLD /* to have fewer states */
#define FORGOTTEN(note) OLD
#endif
#define FORGET(note) WHEN(!IS_OF(note, SUCCESSOR(EPOCH(r))), note = FORGOTTEN(note))
byte head[2 * N * N * TOKENS] = AT_FIRST, announcement[2 * N * N] = AT_FIRST;
byte tail[2 * N * N * TOKENS], slot[2 * N * N * TOKENS * PARTS];
byte clearance[2 * N * N] = NOTE(0, 0);
#ifndef AT_ONCE
/* In flight there. */
byte head_sent[2 * N * N * TOKENS], tail_sent[2 * N * N * TOKENS];
byte slot_sent[2 * N * N * TOKENS * PARTS], announcement_sent[2 * N * N], clearance_sent[2 * N * N];
#if BUG == BUG_ANNOUNCEMENT_TORN
bit is_torn[2 * N * N];
#endif
#endif

/* What the owner's kernels alone touch: a clean row, as its elements and its source word. */
byte row[N * N * TOKENS], source[N * N * TOKENS];
byte dispatched[N], combined[N];

/* A rank's step and the arguments of its next kernel. */
byte step[N], tokens[N], dests[N * TOKENS];
bit is_ahead[N];
#if BUG == BUG_HEAD_MISCOUNTS
byte tokens_before[N];
#endif
/* Threads that have not left: receivers of each row (bits), and of each token's parts. */
#define POLLS_HEAD 1
#define POLLS_TAIL 2
byte row_threads[N * N * TOKENS], slots_awaited[N * TOKENS * PARTS];
bit herald_runs[N], herald_clears[N];
byte receivers_left[N], reducers_left[N];

hidden byte i, j, k, value;

#ifndef STEPS
#define STEPS 4
#endif
#define SUCCESSOR(number) (((number) + 1) % STEPS)
#define PREDECESSOR(number) (((number) + STEPS - 1) % STEPS)
/* The epoch as a thread of dispatch reads it. */
#if BUG == BUG_COUNTED_ONCE
#define EPOCH(rank) SUCCESSOR(dispatched[rank])
#else
#define EPOCH(rank) SUCCESSOR(combined[rank])
#endif
#define STAGING_HALF(epoch) (BUG == BUG_ONE_STAGING -> 0 : (epoch) % 2)
#define SLOT_HALF(epoch) (BUG == BUG_ONE_SLOT -> 0 : (epoch) % 2)
#define ANNOUNCED_HALF(epoch) (BUG == BUG_ONE_ANNOUNCEMENT -> 0 : (epoch) % 2)

#define WHEN(condition, action) if :: condition -> action :: else fi
/* A d_step must not end in a loop: hence the last assignment. */
#define EACH_RANK(...) for (i : 0 .. N - 1) { __VA_ARGS__ } i = 0
#define EACH_ROW(...) EACH_RANK(for (j : 0 .. TOKENS - 1) { __VA_ARGS__ })
#define EACH_PART(...) for (k : 0 .. PARTS - 1) { __VA_ARGS__ }
#if N == 2
#define ALL_RANKS(holds) (holds(0) && holds(1))
#else
#define ALL_RANKS(holds) (holds(0) && holds(1) && holds(2))
#endif
#define IS_AHEAD(rank) is_ahead[rank]

/* Nothing is overwritten before it was read and emptied: not even unseen. */
#define PUT(place, at, what) assert(place[at] == 0); place[at] = what
/* No note is overwritten that the running dispatch waits for or reads: its herald leaves last. */
#define LAST_EPOCH(d) PREDECESSOR(EPOCH(d))
#define SPOILS_HEADS(half, d, note) (STAGING_HALF(EPOCH(d)) == half && !IS_OF(note, EPOCH(d)))
#define SPOILS_ANNOUNCEMENTS(half, d, note) \
    (ANNOUNCED_HALF(EPOCH(d)) == half && !IS_OF(note, EPOCH(d)))
#define SPOILS_CLEARANCES(half, d, note) \
    (ANNOUNCED_HALF(LAST_EPOCH(d)) == half && !IS_OF(note, LAST_EPOCH(d)))
#define TELL(place, at, note, spoils, half, d) \
    assert(!herald_runs[d] || !spoils(half, d, note)); \
    place[at] = note
#ifdef AT_ONCE
#define STORE(place, sent, at, what) PUT(place, at, what)
#define STORE_NOTE(place, sent, at, note, spoils, half, d) TELL(place, at, note, spoils, half, d)
#define IS_IN_FLIGHT(sent, at) false
#else
#define STORE(place, sent, at, what) assert(sent[at] == 0); sent[at] = what
#define STORE_NOTE(place, sent, at, note, spoils, half, d) STORE(place, sent, at, note)
#define IS_IN_FLIGHT(sent, at) (sent[at] != 0)
#endif

#include "fence_free_kernels.pml"

#ifndef AT_ONCE
#define LAND(place, sent, at) \
    :: d_step { sent[at] -> PUT(place, at, sent[at]); sent[at] = 0 }
#define LAND_NOTE(place, sent, at, spoils, half) \
    :: d_step { sent[at] -> TELL(place, at, sent[at], spoils, half, d); sent[at] = 0 }
#if BUG == BUG_ANNOUNCEMENT_TORN
#define TORN(half) is_torn[HALF_AT(half, d, s)]
#define WHOLE(half) announcement_sent[HALF_AT(half, d, s)]
#define PIECE(half) (NOTE(0, SAYS(announcement[HALF_AT(half, d, s)])) - 1 + (WHOLE(half) & 7))
#define LAND_ANNOUNCEMENT(half) \
    :: d_step { WHOLE(half) && !TORN(half) -> TORN(half) = 1; \
            TELL(announcement, HALF_AT(half, d, s), PIECE(half), SPOILS_ANNOUNCEMENTS, half, d) } \
    :: d_step { TORN(half) -> TORN(half) = 0; \
            TELL(announcement, HALF_AT(half, d, s), WHOLE(half), SPOILS_ANNOUNCEMENTS, half, d); \
            WHOLE(half) = 0 }
#else
#define LAND_ANNOUNCEMENT(half) \
    LAND_NOTE(announcement, announcement_sent, HALF_AT(half, d, s), SPOILS_ANNOUNCEMENTS, half)
#endif
#if PARTS == 2
#define LAND_SLOT(half, token) \
    LAND(slot, slot_sent, PART(half, d, s, token, 0)) \
    LAND(slot, slot_sent, PART(half, d, s, token, 1))
#else
#define LAND_SLOT(half, token) LAND(slot, slot_sent, PART(half, d, s, token, 0))
#endif
#define LAND_ROW(half, token) \
    LAND_NOTE(head, head_sent, HALF_CELL(half, d, s, token), SPOILS_HEADS, half) \
    LAND(tail, tail_sent, HALF_CELL(half, d, s, token)) \
    LAND_SLOT(half, token)
#define LAND_CLEARANCE(half) \
    LAND_NOTE(clearance, clearance_sent, HALF_AT(half, d, s), SPOILS_CLEARANCES, half)
#if TOKENS == 2
#define LAND_HALF(half) \
    LAND_ANNOUNCEMENT(half) LAND_CLEARANCE(half) LAND_ROW(half, 0) LAND_ROW(half, 1)
#else
#define LAND_HALF(half) LAND_ANNOUNCEMENT(half) LAND_CLEARANCE(half) LAND_ROW(half, 0)
#endif

/* What rank s stores in memory of rank d. */
active [N * N] proctype link() {
    byte d = (_pid - 2 * N - N * N) / N, s = (_pid - 2 * N - N * N) % N;

    do
    LAND_HALF(0)
    LAND_HALF(1)
    od
}
#endif
