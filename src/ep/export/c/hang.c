/* What a kernel whose wait expired has left, as numbers and as a sentence. */
#include <stdio.h>
#include <string.h>

#include "internal.h"
#include "tables.h"

/* Last step that each rank was seen in, as far as its words have come by now. On a stream that
 * waits for no other: nobody knows what the device is at. */
static void read_seen(const ep_exchange* exchange, uint64_t* seen) {
  const driver_calls* cuda = exchange->cuda;
  static const uint64_t bytes = sizeof(uint32_t) * ANNOUNCEMENT_WORDS * ANNOUNCEMENT_LINES;
  uint32_t words[ANNOUNCEMENT_LINES * ANNOUNCEMENT_WORDS];
  CUstream stream;
  if (cuda->stream_create(&stream, STREAM_NON_BLOCKING) != 0) return;
  CUresult result = cuda->copy_to_host(words, exchange->own + ANNOUNCEMENTS_OFFSET, bytes, stream);
  if (result == 0) result = cuda->stream_synchronize(stream);
  cuda->stream_destroy(stream);
  if (result != 0) return;
  for (int line = 0; line < ANNOUNCEMENT_LINES; line++) {
    const uint32_t* words_of = words + line * ANNOUNCEMENT_WORDS;
    uint64_t step = words_of[0] | (uint64_t)words_of[1] << 32;
    if (step > seen[line % EP_RANKS]) seen[line % EP_RANKS] = step;
  }
}

/* From any thread, and beside a capture, which a call that may wait for the device would spoil.
 * What the driver does not give stays 0: that a wait has expired is known without it. */
static void try_seen(const ep_exchange* exchange, uint64_t* seen) {
  const driver_calls* cuda = exchange->cuda;
  CUcontext context;
  int mode = STREAM_CAPTURE_MODE_RELAXED;
  if (cuda->exchange_capture_mode(&mode) != 0) return;
  if (cuda->ctx_push_current(exchange->context) == 0) {
    read_seen(exchange, seen);
    cuda->ctx_pop_current(&context);
  }
  cuda->exchange_capture_mode(&mode);
}

static uint32_t word(const ep_exchange* exchange, int index) {
  return __atomic_load_n(&exchange->record[index], __ATOMIC_RELAXED);
}

static uint64_t two_words(const ep_exchange* exchange, int index) {
  return word(exchange, index) | (uint64_t)word(exchange, index + 1) << 32;
}

bool is_expired(const ep_exchange* exchange) {
  /* The kernel writes the state last. */
  return __atomic_load_n(&exchange->record[RECORD_STATE], __ATOMIC_ACQUIRE) != 0;
}

void read_hang(const ep_exchange* exchange, ep_hang* hang) {
  hang->phase = word(exchange, RECORD_PHASE);
  hang->rank = (int32_t)word(exchange, RECORD_RANK);
  hang->step = two_words(exchange, RECORD_STEP);
  hang->waited_us = word(exchange, RECORD_WAITED_US);
  hang->awaited[0] = two_words(exchange, RECORD_AWAITED);
  hang->awaited[1] = word(exchange, RECORD_AWAITED + 2);
  try_seen(exchange, hang->seen);
}

void forget_hang(ep_exchange* exchange) {
  /* The state first: is_expired after read_hang then tells that what was read is no longer so. */
  __atomic_store_n(&exchange->record[RECORD_STATE], 0, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  for (int index = 0; index < RECORD_WORDS; index++) {
    if (index != RECORD_STATE) __atomic_store_n(&exchange->record[index], 0, __ATOMIC_RELAXED);
  }
}

typedef struct {
  char* text;
  size_t size, length;
} sink;

static void add(sink* to, const char* format, uint64_t a, uint64_t b) {
  size_t room = to->length < to->size ? to->size - to->length : 0;
  /* The formats are those below, each with as many numbers as it is given. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  int length = snprintf(room ? to->text + to->length : NULL, room, format, a, b);
#pragma GCC diagnostic pop
  if (length > 0) to->length += (size_t)length;
}

static bool is_awaited(const ep_hang* hang, int rank) {
  return hang->awaited[rank / 64] >> (rank % 64) & 1;
}

/* "rank 3", "ranks 0-14, 16" */
static void add_ranks(sink* to, const ep_hang* hang) {
  int count = 0;
  for (int rank = 0; rank < EP_MAX_RANKS; rank++) count += is_awaited(hang, rank);
  if (count == 0) add(to, "no rank", 0, 0);
  if (count > 0) add(to, count == 1 ? "rank " : "ranks ", 0, 0);
  bool is_first = true;
  for (int rank = 0; rank < EP_MAX_RANKS; rank++) {
    if (!is_awaited(hang, rank)) continue;
    int last = rank;
    while (last + 1 < EP_MAX_RANKS && is_awaited(hang, last + 1)) last++;
    if (!is_first) add(to, ", ", 0, 0);
    add(to, "%llu", (uint64_t)rank, 0);
    if (last > rank) add(to, "-%llu", (uint64_t)last, 0);
    is_first = false;
    rank = last;
  }
}

static void add_seen(sink* to, const ep_hang* hang) {
  uint64_t seen[EP_MAX_RANKS];
  int count = 0;
  bool differ = false;
  for (int rank = 0; rank < EP_MAX_RANKS; rank++) {
    if (!is_awaited(hang, rank)) continue;
    seen[count++] = hang->seen[rank];
    differ |= seen[count - 1] != seen[0];
  }
  if (count == 0) return;
  add(to, " (their last seen step: ", 0, 0);
  for (int index = 0; index < (differ ? count : 1); index++) {
    add(to, index ? ", %llu" : "%llu", seen[index], 0);
  }
  add(to, ")", 0, 0);
}

int ep_hang_text(const ep_hang* hang, char* text, size_t size_bytes) {
  sink to = {text, text == NULL ? 0 : size_bytes, 0};
  if (to.size != 0) text[0] = '\0';
  if (hang == NULL || hang->phase == 0) {
    add(&to, "no wait has expired", 0, 0);
    return (int)to.length;
  }
  if (hang->size_bytes != sizeof *hang || hang->phase > 2) {
    add(&to, "this is no hang of ep_poll; begin with EP_HANG_INIT", 0, 0);
    return (int)to.length;
  }
  add(&to, "rank %lld: ", (uint64_t)(int64_t)hang->rank, 0);
  add(&to, hang->phase == 1 ? "dispatch of step %llu" : "combine of step %llu", hang->step, 0);
  /* Tenths of a second, rounded. */
  uint64_t tenths = hang->waited_us / 100000 + (hang->waited_us % 100000 >= 50000);
  add(&to, " waited %llu.%llu s for ", tenths / 10, tenths % 10);
  add_ranks(&to, hang);
  add_seen(&to, hang);
  add(&to,
      "; look at those ranks' logs first; if they are merely slow, go on by ep_arm on every rank, "
      "and raise the timeout",
      0, 0);
  return (int)to.length;
}
