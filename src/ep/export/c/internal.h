/* What the files of the library share. tables.h holds what python -m ep.export has worked out. */
#ifndef EP_INTERNAL_H
#define EP_INTERNAL_H

#include <stdbool.h>

#include "driver.h"
#include "ep.h"

enum { DISPATCH, COMBINE, COMBINE_NORM, NUM_KERNELS };

/* What a kernel takes, by the names that its parameters have. */
typedef struct {
  uint64_t table, x, ids, weights, partials, norm_weight, out, record, timeout_ns, grace_ns, stamps;
  int32_t rank, num_tokens, num_senders;
  float eps;
} arguments;

enum { MAX_PARAMS = 16 };

typedef struct {
  const char* arch; /* as "sm_90a" */
  int kind;
  bool starts_early; /* the next kernel may, too: only where ranks share no GPU */
  const char* entry;
  unsigned int threads;
  const unsigned char* cubin;
} kernel_image;

/* Words of a buffer that are alike: height times width_words, pitch_bytes apart. */
typedef struct {
  uint64_t offset_bytes, width_words, height, pitch_bytes;
  int unknown; /* 0: word is the word */
  uint32_t word;
} buffer_fill;

enum { WORD_KNOWN, WORD_EMPTY_ID, WORD_STEP_LOW, WORD_STEP_HIGH };

typedef struct {
  const char* name;
  uint64_t offset_bytes, size_bytes;
} buffer_field;

/* Most CTAs for each SM that take a role in launches of up_to tokens at most; below 0: no limit. */
typedef struct {
  int32_t up_to;
  double senders, waiters;
} tuning_point;

typedef struct {
  const char* arch;
  const tuning_point* points[2]; /* dispatch, combine; each ends with up_to 0 */
} tuning_entry;

typedef struct {
  CUlibrary library;
  CUfunction function;
  unsigned int threads;
  int32_t resident; /* CTAs that may take roles, all on the GPU at once with those of other ranks */
} loaded_kernel;

struct ep_exchange {
  const driver_calls* cuda;
  CUcontext context; /* that of ep_open */
  loaded_kernel kernels[NUM_KERNELS];
  const tuning_entry* tuning;
  double sms; /* of this rank's share of the GPU */
  bool starts_early;
  uint64_t own;
  uint64_t peers[EP_RANKS];
  CUdeviceptr table;
  uint32_t* record;
  CUdeviceptr record_device;
  uint64_t timeout_ns, grace_ns;
  int32_t rank;
  int32_t sent_tokens; /* of a dispatch that no combine has answered; below 0: there is none */
  ep_stream sent_stream;
  bool is_armed;
};

typedef struct {
  int32_t senders, ctas;
} launch_grid;

/* The grid of ep.kernels.grid, with what the tuning table says. kind: DISPATCH or else. */
launch_grid find_grid(const ep_exchange* exchange, int kind, int32_t num_tokens);

/* Whether a wait of a kernel has expired. What the record says beside it is read after that. */
bool is_expired(const ep_exchange* exchange);

/* Decode the record of an exchange whose wait has expired. */
void read_hang(const ep_exchange* exchange, ep_hang* hang);

/* Make the record that of no hang; another thread may be reading it. */
void forget_hang(ep_exchange* exchange);

/* Keep words for ep_last_error, and give the status back. */
ep_status fail(ep_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

/* The same, where the driver refused call. */
ep_status fail_driver(const driver_calls* cuda, const char* call, CUresult result);

#endif
