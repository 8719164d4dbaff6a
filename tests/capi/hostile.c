/* Random calls, good and bad, of the exported library over the played driver, for sanitizers: what
 * the driver refuses, and what nobody should pass. Gives 0 if the library keeps its own rules. */
#include <assert.h>
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep.h"

static int *fails_at, *calls, *held, *num_launches, *capture_mode, *pushed;
static uint64_t peers[EP_RANKS];
static ep_exchange* exchange;
static int armed, sent, statuses[EP_TIMED_OUT + 1];
static ep_stream sent_stream;

static uint64_t draw(uint64_t below) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (state >> 16) % below;
}

static const void* array(uint64_t odd) {
  return (const void*)(uintptr_t)(draw(8) ? 16 : draw(2) * odd);
}

static ep_status try_open(void) {
  ep_options options = EP_OPTIONS_INIT;
  options.rank = (int32_t)draw(EP_RANKS);
  options.own = peers[options.rank];
  options.ranks_on_gpu = 1 + (int32_t)draw(EP_RANKS);
  if (draw(3) == 0) {
    memset((char*)&options + draw(sizeof options - 8), draw(2) ? 0 : 0xAB, 1 + draw(8));
    bool is_rank = options.rank >= 0 && options.rank < EP_RANKS;
    options.own = is_rank ? peers[options.rank] : 128;
    options.config_id = draw(9) ? EP_CONFIG_ID : NULL;
  }
  options.peers = draw(9) ? peers : NULL;
  ep_status status = ep_open(&options, &exchange);
  armed = 0;
  sent = -1;
  assert((status == EP_OK) == (exchange != NULL));
  assert(exchange != NULL || *held == 0);
  return status;
}

static ep_status try_arm(void) {
  ep_arming arming = EP_ARMING_INIT;
  arming.step = draw(UINT64_MAX);
  arming.excluded[draw(2)] = draw(3) ? 0 : UINT64_C(1) << draw(64);
  ep_status status = ep_arm(exchange, draw(2) ? NULL : &arming);
  if (status == EP_ERROR_DRIVER) armed = 0;
  if (status == EP_OK) {
    armed = 1;
    sent = -1;
  }
  return status;
}

static ep_status try_dispatch(void) {
  int32_t tokens = (int32_t)draw(EP_MAX_TOKENS + 3) - 1;
  ep_stream stream = (ep_stream)(uintptr_t)(draw(2) * 16);
  ep_status status = ep_dispatch(exchange, array(8), array(2), array(2), tokens, stream);
  if (status == EP_OK) {
    assert(armed && sent < 0 && tokens >= 0 && tokens <= EP_MAX_TOKENS);
    sent = tokens;
    sent_stream = stream;
  }
  assert(*num_launches == (status == EP_OK));
  return status;
}

static ep_status try_combine(void) {
  int32_t tokens = sent + (draw(6) == 0);
  const void* norm = draw(2) ? NULL : array(8);
  ep_status status = ep_combine(exchange, array(8), array(2), norm, draw(5) ? 0.0f : NAN,
                                (void*)(uintptr_t)array(8), tokens, sent_stream);
  if (status == EP_OK) {
    assert(armed && sent == tokens);
    sent = -1;
  }
  assert(*num_launches == (status == EP_OK));
  return status;
}

static void write_hang(void) {
  ep_hang hang = EP_HANG_INIT;
  hang.phase = (uint32_t)draw(4);
  hang.rank = (int32_t)draw(UINT32_MAX);
  hang.step = draw(2) ? UINT64_MAX : draw(9);
  hang.waited_us = draw(2) ? UINT64_MAX : draw(UINT32_MAX);
  for (int half = 0; half < 2; half++) hang.awaited[half] = draw(2) ? UINT64_MAX : draw(UINT64_MAX);
  for (int rank = 0; rank < EP_MAX_RANKS; rank++) hang.seen[rank] = draw(3) ? draw(3) : UINT64_MAX;
  /* All of the text's bytes are watched, and not one more is there. */
  size_t size = draw(3000);
  char* text = malloc(size);
  int needed = ep_hang_text(&hang, text, size);
  assert(needed > 0 && ep_hang_text(&hang, NULL, size) == needed);
  if (size) assert(strlen(text) == ((size_t)needed < size ? (size_t)needed : size - 1));
  free(text);
}

static ep_status try_looks(void) {
  uint64_t step;
  ep_received received = EP_RECEIVED_INIT;
  ep_hang hang = EP_HANG_INIT;
  assert(ep_rows(exchange, &received) == EP_OK && ep_poll(exchange, &hang) == EP_OK);
  write_hang();
  return ep_step(exchange, &step);
}

static ep_status call(void) {
  uint64_t kind = draw(10);
  if (exchange != NULL && kind == 0) {
    assert(ep_close(exchange) == EP_OK && *held == 0);
    exchange = NULL;
  }
  if (exchange == NULL) return try_open();
  if (kind < 3) return try_arm();
  if (kind < 6) return try_dispatch();
  return kind < 9 ? try_combine() : try_looks();
}

int main(int count, char** words) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  assert(count == 2 && driver != NULL);
  fails_at = dlsym(driver, "played_fails_at");
  calls = dlsym(driver, "played_calls");
  held = dlsym(driver, "played_held");
  num_launches = dlsym(driver, "played_num_launches");
  capture_mode = dlsym(driver, "played_capture_mode");
  pushed = dlsym(driver, "played_pushed");
  char* memory = aligned_alloc(EP_BUFFER_ALIGN, EP_BUFFER_BYTES * EP_RANKS);
  for (int rank = 0; rank < EP_RANKS; rank++) {
    peers[rank] = (uintptr_t)memory + EP_BUFFER_BYTES * (uint64_t)rank;
  }
  for (int left = atoi(words[1]); left > 0; left--) {
    *calls = *num_launches = 0;
    *fails_at = draw(3) ? -1 : (int)draw(30);
    statuses[call()]++;
    assert(*capture_mode == 0 && *pushed == 0);
  }
  *fails_at = -1;
  assert(ep_close(exchange) == EP_OK && *held == 0);
  free(memory);
  for (int status = 0; status <= EP_TIMED_OUT; status++) printf("%d ", statuses[status]);
  return 0;
}
