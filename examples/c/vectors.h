/* What vectors.py writes: one rank's half of a step, and whether what the GPU made is the same. */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ep.h"

enum { VECTORS_FORMAT = 1 };

typedef struct {
  int32_t tokens;
  float eps;
  /* What goes in. */
  uint16_t *x, *partials, *norm_weight;
  int32_t* ids;
  float* weights;
  /* What must come out: rows, and the result. */
  uint8_t *rows_x, *rows_scales;
  int32_t *rows_ids, *rows_source;
  float* rows_weights;
  uint16_t* result;
} vectors_step;

static inline void* vectors_take(FILE* file, size_t bytes) {
  void* data = malloc(bytes + 1);
  if (data == NULL || fread(data, 1, bytes, file) != bytes) {
    fprintf(stderr, "the vectors are cut short: were they written for this ep.h?\n");
    exit(2);
  }
  return data;
}

/* Read a step of a rank; 0 if there is none. */
static inline int vectors_read(const char* folder, int step, int rank, vectors_step* to) {
  char path[4096];
  snprintf(path, sizeof path, "%s/step%d_rank%d.bin", folder, step, rank);
  FILE* file = fopen(path, "rb");
  if (file == NULL) return 0;
  int32_t* head = (int32_t*)vectors_take(file, 2 * sizeof(int32_t));
  float* eps = (float*)vectors_take(file, sizeof(float));
  if (head[0] != VECTORS_FORMAT || head[1] < 0 || head[1] > EP_MAX_TOKENS) {
    fprintf(stderr, "%s is not for this program\n", path);
    exit(2);
  }
  to->tokens = head[1];
  to->eps = eps[0];
  free(head);
  free(eps);
  size_t tokens = (size_t)to->tokens;
  to->x = (uint16_t*)vectors_take(file, tokens * EP_HIDDEN * 2);
  to->ids = (int32_t*)vectors_take(file, tokens * EP_TOP_K * 4);
  to->weights = (float*)vectors_take(file, tokens * EP_TOP_K * 4);
  to->partials = (uint16_t*)vectors_take(file, (size_t)EP_ROWS * EP_HIDDEN * 2);
  to->norm_weight = (uint16_t*)vectors_take(file, EP_HIDDEN * 2);
  to->rows_x = (uint8_t*)vectors_take(file, (size_t)EP_ROWS * EP_HIDDEN);
  to->rows_scales = (uint8_t*)vectors_take(file, (size_t)EP_ROWS * EP_SCALES);
  to->rows_ids = (int32_t*)vectors_take(file, (size_t)EP_ROWS * EP_TOP_K * 4);
  to->rows_weights = (float*)vectors_take(file, (size_t)EP_ROWS * EP_TOP_K * 4);
  to->rows_source = (int32_t*)vectors_take(file, (size_t)EP_ROWS * 4);
  to->result = (uint16_t*)vectors_take(file, tokens * EP_HIDDEN * 2);
  if (fgetc(file) != EOF) {
    fprintf(stderr, "%s is too long: were the vectors written for this ep.h?\n", path);
    exit(2);
  }
  fclose(file);
  return 1;
}

static inline void vectors_free(vectors_step* step) {
  void* all[] = {step->x,           step->ids,         step->weights,
                 step->partials,    step->norm_weight, step->rows_x,
                 step->rows_scales, step->rows_ids,    step->rows_weights,
                 step->rows_source, step->result};
  for (size_t index = 0; index < sizeof all / sizeof *all; index++) free(all[index]);
}

/* Rows that differ from the oracle's, bit for bit; what empty rows hold of x and scales is only
 * finite. Arrays as ep_received has them, copied to the host; source with its stride. */
static inline int vectors_wrong_rows(const vectors_step* want, const uint8_t* x,
                                     const uint8_t* scales, const int32_t* ids,
                                     const float* weights, const int32_t* source, size_t stride) {
  int wrong = 0;
  for (size_t row = 0; row < EP_ROWS; row++) {
    int same = source[row * stride] == want->rows_source[row];
    same &= !memcmp(ids + row * EP_TOP_K, want->rows_ids + row * EP_TOP_K, EP_TOP_K * 4);
    same &= !memcmp(weights + row * EP_TOP_K, want->rows_weights + row * EP_TOP_K, EP_TOP_K * 4);
    const uint8_t *x_row = x + row * EP_HIDDEN, *scales_row = scales + row * EP_SCALES;
    if (want->rows_source[row] >= 0) {
      same &= !memcmp(x_row, want->rows_x + row * EP_HIDDEN, EP_HIDDEN);
      same &= !memcmp(scales_row, want->rows_scales + row * EP_SCALES, EP_SCALES);
    } else {
      for (size_t index = 0; index < EP_HIDDEN; index++) same &= (x_row[index] & 0x7F) != 0x7F;
      for (size_t index = 0; index < EP_SCALES; index++) same &= scales_row[index] != 0xFF;
    }
    wrong += !same;
  }
  return wrong;
}

static inline int vectors_wrong_result(const vectors_step* want, const uint16_t* result) {
  return memcmp(result, want->result, (size_t)want->tokens * EP_HIDDEN * 2) != 0;
}

#endif
