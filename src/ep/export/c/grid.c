/* How many CTAs a launch gets: what ep.kernels.grid and ep.kernels.tuning compute. */
#include "internal.h"
#include "tables.h"

static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }

/* CTAs on this rank's share of the GPU; below 0: no limit. */
static int32_t limit(double per_sm, double sms) {
  return per_sm < 0 ? -1 : most(1, (int32_t)(per_sm * sms));
}

/* Of the role that chooses first: it leaves one to the other role. */
static int32_t share(int32_t limit, int32_t resident) {
  return limit < 0 ? resident / 2 : least(limit, resident - 1);
}

static int32_t at_most(int32_t limit, int32_t resident) { return limit < 0 ? resident : limit; }

launch_grid find_grid(const ep_exchange* exchange, int kind, int32_t num_tokens) {
  int32_t resident = exchange->kernels[kind].resident;
  int32_t senders_limit = -1, waiters_limit = -1;
  if (exchange->tuning != NULL) {
    const tuning_point* point = exchange->tuning->points[kind != DISPATCH];
    while (point->up_to != 0 && point->up_to < num_tokens) point++;
    if (point->up_to != 0) {
      senders_limit = limit(point->senders, exchange->sms);
      waiters_limit = limit(point->waiters, exchange->sms);
    }
  }
  int32_t sources = EP_RANKS - 1;
  /* There is a CTA for some tokens of every source even where this rank has fewer of its own. */
  int64_t all_rows = (int64_t)sources * most(num_tokens, least(EP_MAX_TOKENS, SPARE_TOKENS));
  int32_t rows = all_rows < INT32_MAX ? (int32_t)all_rows : INT32_MAX;
  int32_t senders, waiters;
  if (kind != DISPATCH) {
    waiters = least(num_tokens, most(1, share(waiters_limit, resident)));
    senders = most(1, least(rows, least(resident - waiters, at_most(senders_limit, resident))));
  } else if (sources == 0) {
    senders = most(1, least(num_tokens, least(resident, at_most(senders_limit, resident))));
    waiters = 0;
  } else {
    senders = most(1, least(num_tokens, share(senders_limit, resident)));
    waiters = most(1, least(rows, least(resident - senders, at_most(waiters_limit, resident))));
    if (waiters > sources) waiters -= waiters % sources;
  }
  return (launch_grid){senders, senders + waiters};
}
