/* What pairs cost the host by the C API: built by ep.bench.c_loop with an exported library. */
#include <time.h>

#include "ep.h"

typedef struct {
  const void* x;
  const int32_t* ids;
  const float* weights;
  void* out;
  int32_t tokens;
} loop_step;

/* Given the calls, not linked with them: of several libraries that are loaded, all named libep.so,
 * the linker would take the first. */
__attribute__((visibility("default"))) int ep_host_loop(
    __typeof__(ep_dispatch)* dispatch, __typeof__(ep_combine)* combine, ep_exchange* exchange,
    const loop_step* steps, int num_steps, int pairs, const void* partials, const void* norm_weight,
    float eps, ep_stream stream, uint64_t* took_ns) {
  struct timespec start, end;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int pair = 0; pair < pairs; pair++) {
    const loop_step* step = &steps[pair % num_steps];
    ep_status status = dispatch(exchange, step->x, step->ids, step->weights, step->tokens, stream);
    if (status != EP_OK) return (int)status;
    status =
        combine(exchange, partials, step->ids, norm_weight, eps, step->out, step->tokens, stream);
    if (status != EP_OK) return (int)status;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  *took_ns = (uint64_t)(end.tv_sec - start.tv_sec) * 1000000000u + (uint64_t)end.tv_nsec -
             (uint64_t)start.tv_nsec;
  return EP_OK;
}
