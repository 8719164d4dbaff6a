/* Shows: the exchange in C, on plain CUDA memory: one process plays all ranks, spread over its
 * GPUs.
 *
 * Run with: see CMakeLists.txt beside this file; then build/08_peer_memory build/vectors
 *
 * Each rank's buffer is a cudaMalloc, which GPUs with peer access reach at the same address.
 * Engines of several processes do the same with cudaIpcOpenMemHandle, or
 * cuMemImportFromShareableHandle.
 */
#include <cuda_runtime_api.h>

#include "vectors.h"

#define CUDA(call)                                                                    \
  do {                                                                                \
    cudaError_t error_ = (call);                                                      \
    if (error_ != cudaSuccess) {                                                      \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      exit(1);                                                                        \
    }                                                                                 \
  } while (0)

#define EP(call)                                                           \
  do {                                                                     \
    if ((call) != EP_OK) {                                                 \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, ep_last_error()); \
      exit(1);                                                             \
    }                                                                      \
  } while (0)

typedef struct {
  int gpu;
  void* buffer;
  cudaStream_t stream;
  ep_exchange* exchange;
  /* Arrays of a step, in device memory. */
  void *x, *partials, *norm_weight, *out;
  int32_t* ids;
  float* weights;
} rank_state;

static rank_state ranks[EP_RANKS];

static void* device_array(size_t bytes) {
  void* array;
  CUDA(cudaMalloc(&array, bytes));
  return array;
}

static void put(const rank_state* rank, void* to, const void* from, size_t bytes) {
  CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, rank->stream));
}

static void* get(const rank_state* rank, const void* from, size_t bytes) {
  void* data = malloc(bytes + 1);
  CUDA(cudaMemcpyAsync(data, from, bytes, cudaMemcpyDeviceToHost, rank->stream));
  CUDA(cudaStreamSynchronize(rank->stream));
  return data;
}

static int spread_over_gpus(void) {
  int gpus;
  CUDA(cudaGetDeviceCount(&gpus));
  if (gpus > EP_RANKS) gpus = EP_RANKS;
  for (int gpu = 0; gpu < gpus; gpu++) {
    CUDA(cudaSetDevice(gpu));
    for (int peer = 0; peer < gpus; peer++) {
      if (peer != gpu) CUDA(cudaDeviceEnablePeerAccess(peer, 0));
    }
  }
  return gpus;
}

static void open_all(int gpus) {
  uint64_t peers[EP_RANKS];
  for (int index = 0; index < EP_RANKS; index++) {
    rank_state* rank = &ranks[index];
    rank->gpu = index % gpus;
    CUDA(cudaSetDevice(rank->gpu));
    rank->buffer = device_array(EP_BUFFER_BYTES);
    CUDA(cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking));
    peers[index] = (uint64_t)(uintptr_t)rank->buffer;
    rank->x = device_array((size_t)EP_MAX_TOKENS * EP_HIDDEN * 2);
    rank->out = device_array((size_t)EP_MAX_TOKENS * EP_HIDDEN * 2);
    rank->partials = device_array((size_t)EP_ROWS * EP_HIDDEN * 2);
    rank->norm_weight = device_array(EP_HIDDEN * 2);
    rank->ids = (int32_t*)device_array((size_t)EP_MAX_TOKENS * EP_TOP_K * 4);
    rank->weights = (float*)device_array((size_t)EP_MAX_TOKENS * EP_TOP_K * 4);
  }
  for (int index = 0; index < EP_RANKS; index++) {
    CUDA(cudaSetDevice(ranks[index].gpu));
    ep_options options = EP_OPTIONS_INIT;
    options.rank = index;
    options.own = peers[index];
    options.peers = peers;
    options.ranks_on_gpu = (EP_RANKS - 1 - ranks[index].gpu) / gpus + 1;
    EP(ep_open(&options, &ranks[index].exchange));
    EP(ep_arm(ranks[index].exchange, NULL));
  }
  /* Here ranks that are processes have their barrier; this one has armed them all. */
}

static void dispatch_all(vectors_step* steps) {
  for (int index = 0; index < EP_RANKS; index++) {
    rank_state* rank = &ranks[index];
    const vectors_step* step = &steps[index];
    size_t tokens = (size_t)step->tokens;
    CUDA(cudaSetDevice(rank->gpu));
    put(rank, rank->x, step->x, tokens * EP_HIDDEN * 2);
    put(rank, rank->ids, step->ids, tokens * EP_TOP_K * 4);
    put(rank, rank->weights, step->weights, tokens * EP_TOP_K * 4);
    put(rank, rank->partials, step->partials, (size_t)EP_ROWS * EP_HIDDEN * 2);
    put(rank, rank->norm_weight, step->norm_weight, EP_HIDDEN * 2);
  }
  for (int index = 0; index < EP_RANKS; index++) {
    rank_state* rank = &ranks[index];
    CUDA(cudaSetDevice(rank->gpu));
    EP(ep_dispatch(rank->exchange, rank->x, rank->ids, rank->weights, steps[index].tokens,
                   rank->stream));
  }
}

static int wrong_rows(const rank_state* rank, const vectors_step* want) {
  ep_received rows = EP_RECEIVED_INIT;
  EP(ep_rows(rank->exchange, &rows));
  uint8_t* x = (uint8_t*)get(rank, rows.x, (size_t)EP_ROWS * EP_HIDDEN);
  uint8_t* scales = (uint8_t*)get(rank, rows.scales, (size_t)EP_ROWS * EP_SCALES);
  int32_t* ids = (int32_t*)get(rank, rows.ids, (size_t)EP_ROWS * EP_TOP_K * 4);
  float* weights = (float*)get(rank, rows.weights, (size_t)EP_ROWS * EP_TOP_K * 4);
  int32_t* source = (int32_t*)get(rank, rows.source, EP_ROWS * rows.source_stride * 4);
  int wrong = vectors_wrong_rows(want, x, scales, ids, weights, source, rows.source_stride);
  free(x);
  free(scales);
  free(ids);
  free(weights);
  free(source);
  return wrong;
}

static void poll(const rank_state* rank) {
  ep_hang hang = EP_HANG_INIT;
  if (ep_poll(rank->exchange, &hang) == EP_OK) return;
  char text[512];
  ep_hang_text(&hang, text, sizeof text);
  fprintf(stderr, "%s\n", text);
  exit(1);
}

static int combine_all(vectors_step* steps) {
  int wrong = 0;
  for (int index = 0; index < EP_RANKS; index++) {
    rank_state* rank = &ranks[index];
    CUDA(cudaSetDevice(rank->gpu));
    EP(ep_combine(rank->exchange, rank->partials, rank->ids, rank->norm_weight, steps[index].eps,
                  rank->out, steps[index].tokens, rank->stream));
  }
  for (int index = 0; index < EP_RANKS; index++) {
    rank_state* rank = &ranks[index];
    CUDA(cudaSetDevice(rank->gpu));
    uint16_t* out = (uint16_t*)get(rank, rank->out, (size_t)EP_MAX_TOKENS * EP_HIDDEN * 2);
    poll(rank);
    wrong += vectors_wrong_result(&steps[index], out);
    free(out);
  }
  return wrong;
}

static void close_all(void) {
  for (int index = 0; index < EP_RANKS; index++) {
    CUDA(cudaSetDevice(ranks[index].gpu));
    CUDA(cudaDeviceSynchronize());
  }
  for (int index = 0; index < EP_RANKS; index++) {
    rank_state* rank = &ranks[index];
    CUDA(cudaSetDevice(rank->gpu));
    EP(ep_close(rank->exchange));
    void* arrays[] = {rank->buffer,      rank->x,   rank->out,    rank->partials,
                      rank->norm_weight, rank->ids, rank->weights};
    for (size_t place = 0; place < sizeof arrays / sizeof *arrays; place++) {
      CUDA(cudaFree(arrays[place]));
    }
    CUDA(cudaStreamDestroy(rank->stream));
  }
}

int main(int count, char** words) {
  if (count != 2) {
    fprintf(stderr, "usage: 08_peer_memory VECTORS\n");
    return 2;
  }
  int gpus = spread_over_gpus(), number = 0, failed = 0;
  open_all(gpus);
  vectors_step steps[EP_RANKS];
  for (; vectors_read(words[1], number, 0, &steps[0]); number++) {
    for (int index = 1; index < EP_RANKS; index++) {
      if (!vectors_read(words[1], number, index, &steps[index])) return 2;
    }
    dispatch_all(steps);
    int rows = 0;
    for (int index = 0; index < EP_RANKS; index++) {
      CUDA(cudaSetDevice(ranks[index].gpu));
      rows += wrong_rows(&ranks[index], &steps[index]);
      poll(&ranks[index]);
    }
    int results = combine_all(steps);
    if (rows || results) printf("step %d: %d rows and %d results differ\n", number, rows, results);
    failed |= rows || results;
    for (int index = 0; index < EP_RANKS; index++) vectors_free(&steps[index]);
  }
  close_all();
  printf("%d ranks on %d GPUs: %d steps %s\n", EP_RANKS, gpus, number,
         failed ? "DIFFER" : "came back right");
  return failed || number == 0;
}
