/* What is called in every step. */
#include <float.h>

#include "internal.h"
#include "tables.h"

ep_status ep_poll(ep_exchange* exchange, ep_hang* hang) {
  if (exchange == NULL) return fail(EP_ERROR_ARGUMENT, "the exchange is NULL");
  if (hang != NULL && hang->size_bytes != sizeof *hang) {
    return fail(EP_ERROR_ABI,
                "ep_hang has %zu bytes, this library's has %zu; begin with EP_HANG_INIT",
                hang->size_bytes, sizeof *hang);
  }
  bool has_expired = is_expired(exchange);
  if (hang != NULL) {
    *hang = (ep_hang)EP_HANG_INIT;
    if (has_expired) read_hang(exchange, hang);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (has_expired && !is_expired(exchange)) {
      /* Another thread has armed the buffer meanwhile. */
      *hang = (ep_hang)EP_HANG_INIT;
      has_expired = false;
    }
  }
  if (!has_expired) return EP_OK;
  return fail(EP_TIMED_OUT, "rank %d: a wait has expired; ep_poll has the ranks", exchange->rank);
}

static ep_status check_call(const ep_exchange* exchange, int32_t num_tokens) {
  if (exchange == NULL) return fail(EP_ERROR_ARGUMENT, "the exchange is NULL");
  if (num_tokens < 0 || num_tokens > EP_MAX_TOKENS) {
    return fail(EP_ERROR_ARGUMENT, "num_tokens is %d; allowed is 0..%d", num_tokens, EP_MAX_TOKENS);
  }
  if (!exchange->is_armed) {
    return fail(EP_ERROR_ORDER,
                "the buffer is not armed: call ep_arm on every rank, then a barrier");
  }
  if (is_expired(exchange)) {
    return fail(EP_TIMED_OUT, "rank %d: a wait has expired; ep_poll has the ranks", exchange->rank);
  }
  return EP_OK;
}

static ep_status check_array(const char* name, const void* array, uintptr_t unit) {
  if (array == NULL || (uintptr_t)array % unit != 0) {
    return fail(EP_ERROR_ARGUMENT,
                "%s is at %p; allowed is a device address that is a multiple of %u", name, array,
                (unsigned)unit);
  }
  return EP_OK;
}

static ep_status launch(const ep_exchange* exchange, int kind, arguments* values,
                        ep_stream stream) {
  const loaded_kernel* kernel = &exchange->kernels[kind];
  launch_grid grid = find_grid(exchange, kind, values->num_tokens);
  values->num_senders = grid.senders;
  void* params[MAX_PARAMS];
  const uint16_t* offsets = PARAMS[kind != DISPATCH];
  for (int index = 0; offsets[index] != NO_PARAM; index++) {
    params[index] = (char*)values + offsets[index];
  }
  launch_attribute early = {.id = LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                            .value.programmatic_stream_serialization_allowed = 1};
  launch_config config = {.grid_dim_x = (unsigned)(HERALDS + grid.ctas),
                          .grid_dim_y = 1,
                          .grid_dim_z = 1,
                          .block_dim_x = kernel->threads,
                          .block_dim_y = 1,
                          .block_dim_z = 1,
                          .stream = stream,
                          .attrs = &early,
                          .num_attrs = 1};
  CUresult result = exchange->cuda->launch_kernel(&config, kernel->function, params, NULL);
  return result == 0 ? EP_OK : fail_driver(exchange->cuda, "cuLaunchKernelEx", result);
}

static arguments common(const ep_exchange* exchange, const int32_t* ids, int32_t num_tokens) {
  return (arguments){.table = exchange->table,
                     .ids = (uintptr_t)ids,
                     .record = exchange->record_device,
                     .timeout_ns = exchange->timeout_ns,
                     .grace_ns = exchange->grace_ns,
                     .rank = exchange->rank,
                     .num_tokens = num_tokens};
}

ep_status ep_dispatch(ep_exchange* exchange, const void* x, const int32_t* ids,
                      const float* weights, int32_t num_tokens, ep_stream stream) {
  ep_status status = check_call(exchange, num_tokens);
  if (status != EP_OK) return status;
  if (exchange->sent_tokens >= 0) {
    return fail(EP_ERROR_ORDER, "dispatch follows a dispatch; call ep_combine in between");
  }
  if (num_tokens > 0) {
    if ((status = check_array("x", x, 16)) != EP_OK) return status;
    if ((status = check_array("ids", ids, 4)) != EP_OK) return status;
    if ((status = check_array("weights", weights, 4)) != EP_OK) return status;
  }
  arguments values = common(exchange, ids, num_tokens);
  values.x = (uintptr_t)x;
  values.weights = (uintptr_t)weights;
  status = launch(exchange, DISPATCH, &values, stream);
  if (status == EP_OK) {
    exchange->sent_tokens = num_tokens;
    exchange->sent_stream = stream;
  }
  return status;
}

ep_status ep_combine(ep_exchange* exchange, const void* partials, const int32_t* ids,
                     const void* norm_weight, float eps, void* out, int32_t num_tokens,
                     ep_stream stream) {
  ep_status status = check_call(exchange, num_tokens);
  if (status != EP_OK) return status;
  if (exchange->sent_tokens < 0) {
    return fail(EP_ERROR_ORDER, "combine without a dispatch; call ep_dispatch first");
  }
  if (num_tokens != exchange->sent_tokens || stream != exchange->sent_stream) {
    return fail(EP_ERROR_ARGUMENT,
                "combine of %d tokens on stream %p answers a dispatch of %d on %p; pass the same",
                num_tokens, (void*)stream, exchange->sent_tokens, (void*)exchange->sent_stream);
  }
  if ((status = check_array("partials", partials, 16)) != EP_OK) return status;
  if (num_tokens > 0) {
    if ((status = check_array("ids", ids, 4)) != EP_OK) return status;
    if ((status = check_array("out", out, 16)) != EP_OK) return status;
  }
  if (norm_weight != NULL) {
    if ((status = check_array("norm_weight", norm_weight, 16)) != EP_OK) return status;
    if (!(eps >= 0 && eps <= FLT_MAX)) {
      return fail(EP_ERROR_ARGUMENT, "eps is %g; allowed is a finite number, 0 or more",
                  (double)eps);
    }
  }
  arguments values = common(exchange, ids, num_tokens);
  values.partials = (uintptr_t)partials;
  values.norm_weight = (uintptr_t)norm_weight;
  values.out = (uintptr_t)out;
  values.eps = eps;
  status = launch(exchange, norm_weight == NULL ? COMBINE : COMBINE_NORM, &values, stream);
  if (status == EP_OK) exchange->sent_tokens = -1;
  return status;
}
