/* A CUDA driver of host memory, for the exported library: kernels are noted, not run. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

enum { MOST_LAUNCHES = 64, MOST_FILLS = 16 };

struct launch {
  launch_config config;
  launch_attribute attribute;
  CUfunction function;
  uint64_t params[16];
};

/* What a test sets, and what it reads. */
int played_sms = 132, played_per_sm = 2, played_major = 9, played_minor = 0, played_num_params = 0;
int played_has_context = 1, played_pushed = 0;
int played_param_bytes[16];
int played_fails_at = -1; /* the call, counted from 0, that gives an error */
int played_calls = 0, played_held = 0, played_num_launches = 0, played_capture_mode = 0;
uint32_t* played_wiped = NULL; /* by cuStreamSynchronize */
int played_is_dry = 0;         /* fills are noted alone, the first ones */
int played_num_fills = 0;
uint64_t played_fills[MOST_FILLS][5]; /* address, width, height, pitch, word */
struct launch played_launches[MOST_LAUNCHES];

static CUresult call(void) { return played_calls++ == played_fails_at ? 700 : 0; }

#define PLAY              \
  do {                    \
    CUresult r_ = call(); \
    if (r_) return r_;    \
  } while (0)

CUresult cuCtxGetCurrent(CUcontext* context) {
  PLAY;
  *context = played_has_context ? (CUcontext)0x10 : NULL;
  return 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  PLAY;
  if (context != (CUcontext)0x10) return 1;
  played_pushed++;
  return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = (CUcontext)0x10;
  played_pushed--;
  return 0;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  PLAY;
  *device = 0;
  return 0;
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  PLAY;
  (void)device;
  switch (attribute) {
    case DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = played_sms; return 0;
    case DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = played_major; return 0;
    case DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = played_minor; return 0;
    default: return 1;
  }
}

/* A library is its image, and so is its kernel: the first bytes must be those of an ELF file. */
CUresult cuLibraryLoadData(CUlibrary* library, const void* code, void* a, void** b, unsigned c,
                           void* d, void** e, unsigned f) {
  PLAY;
  if (a || b || c || d || e || f || memcmp(code, "\177ELF", 4) != 0) return 1;
  *library = (CUlibrary)code;
  played_held++;
  return 0;
}

CUresult cuLibraryUnload(CUlibrary library) {
  (void)library;
  played_held--;
  return 0;
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  PLAY;
  if (strncmp(name, "ep_", 3) != 0) return 1;
  *kernel = (CUkernel)library;
  return 0;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  PLAY;
  *function = (CUfunction)kernel;
  return 0;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction function, int threads,
                                                     size_t bytes) {
  PLAY;
  if (function == NULL || threads % 32 != 0 || bytes != 0) return 1;
  *count = played_per_sm;
  return 0;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  PLAY;
  *address = (CUdeviceptr)(uintptr_t)malloc(bytes);
  played_held++;
  return 0;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  free((void*)(uintptr_t)address);
  played_held--;
  return 0;
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  PLAY;
  if (flags != 3) return 1;
  *address = malloc(bytes);
  memset(*address, 0xA5, bytes);
  played_held++;
  return 0;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* address, unsigned flags) {
  PLAY;
  if (flags) return 1;
  *device = (CUdeviceptr)(uintptr_t)address;
  return 0;
}

CUresult cuMemFreeHost(void* address) {
  free(address);
  played_held--;
  return 0;
}

CUresult cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned word, size_t width,
                            size_t height, CUstream stream) {
  PLAY;
  (void)stream;
  if (played_is_dry) {
    if (played_num_fills == MOST_FILLS) return 0;
    uint64_t fill[5] = {to, width, height, pitch, word};
    memcpy(played_fills[played_num_fills++], fill, sizeof fill);
    return 0;
  }
  for (size_t row = 0; row < height; row++) {
    uint32_t* words = (uint32_t*)(uintptr_t)(to + row * pitch);
    for (size_t index = 0; index < width; index++) words[index] = word;
  }
  return 0;
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned word, size_t count, CUstream stream) {
  return cuMemsetD2D32Async(to, 0, word, count, 1, stream);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  PLAY;
  (void)stream;
  memcpy((void*)(uintptr_t)to, from, bytes);
  return 0;
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  PLAY;
  (void)stream;
  memcpy(to, (void*)(uintptr_t)from, bytes);
  return 0;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  PLAY;
  if (flags != STREAM_NON_BLOCKING || played_pushed != 1) return 1;
  *stream = (CUstream)0x20;
  played_held++;
  return 0;
}

CUresult cuStreamSynchronize(CUstream stream) {
  PLAY;
  (void)stream;
  if (played_wiped != NULL) *played_wiped = 0;
  return 0;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  (void)stream;
  played_held--;
  return 0;
}

CUresult cuCtxSynchronize(void) {
  PLAY;
  return 0;
}

CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  PLAY;
  int before = played_capture_mode;
  played_capture_mode = *mode;
  *mode = before;
  return 0;
}

CUresult cuLaunchKernelEx(const launch_config* config, CUfunction function, void** params,
                          void** extra) {
  PLAY;
  if (extra || played_num_launches == MOST_LAUNCHES) return 1;
  struct launch* launch = &played_launches[played_num_launches++];
  memset(launch, 0, sizeof *launch);
  launch->config = *config;
  launch->attribute = *config->attrs;
  launch->function = function;
  for (int index = 0; index < played_num_params; index++) {
    memcpy(&launch->params[index], params[index], played_param_bytes[index]);
  }
  return 0;
}

CUresult cuGetErrorString(CUresult result, const char** words) {
  (void)result;
  *words = "played trouble";
  return 0;
}
