/* The few calls of the CUDA driver, found at run time, so that neither CUDA's headers nor its
 * libraries are needed to build, and a process without a GPU can load the library. */
#ifndef EP_DRIVER_H
#define EP_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUlib_st* CUlibrary;
typedef struct CUkern_st* CUkernel;
typedef struct CUfunc_st* CUfunction;

/* As cuda.h has them; tests/unit/test_export.py compares. */
typedef struct {
  int id;
  char pad[4];
  union {
    char pad[64];
    int programmatic_stream_serialization_allowed;
  } value;
} launch_attribute;

typedef struct {
  unsigned int grid_dim_x, grid_dim_y, grid_dim_z;
  unsigned int block_dim_x, block_dim_y, block_dim_z;
  unsigned int shared_mem_bytes;
  CUstream stream;
  launch_attribute* attrs;
  unsigned int num_attrs;
} launch_config;

enum {
  LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6,
  DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  STREAM_NON_BLOCKING = 1,
  STREAM_CAPTURE_MODE_RELAXED = 2,
  MEMHOSTALLOC_PORTABLE = 1,
  MEMHOSTALLOC_DEVICEMAP = 2
};

/* name here, name in libcuda, arguments */
#define EP_DRIVER_CALLS(X)                                                                     \
  X(ctx_get_current, "cuCtxGetCurrent", (CUcontext*))                                          \
  X(ctx_push_current, "cuCtxPushCurrent_v2", (CUcontext))                                      \
  X(ctx_pop_current, "cuCtxPopCurrent_v2", (CUcontext*))                                       \
  X(ctx_get_device, "cuCtxGetDevice", (CUdevice*))                                             \
  X(device_get_attribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                       \
  X(library_load_data, "cuLibraryLoadData",                                                    \
    (CUlibrary*, const void*, void*, void**, unsigned int, void*, void**, unsigned int))       \
  X(library_unload, "cuLibraryUnload", (CUlibrary))                                            \
  X(library_get_kernel, "cuLibraryGetKernel", (CUkernel*, CUlibrary, const char*))             \
  X(kernel_get_function, "cuKernelGetFunction", (CUfunction*, CUkernel))                       \
  X(occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", (int*, CUfunction, int, size_t)) \
  X(mem_alloc, "cuMemAlloc_v2", (CUdeviceptr*, size_t))                                        \
  X(mem_free, "cuMemFree_v2", (CUdeviceptr))                                                   \
  X(mem_host_alloc, "cuMemHostAlloc", (void**, size_t, unsigned int))                          \
  X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2",                               \
    (CUdeviceptr*, void*, unsigned int))                                                       \
  X(mem_free_host, "cuMemFreeHost", (void*))                                                   \
  X(memset_words, "cuMemsetD32Async", (CUdeviceptr, unsigned int, size_t, CUstream))           \
  X(memset_words_2d, "cuMemsetD2D32Async",                                                     \
    (CUdeviceptr, size_t, unsigned int, size_t, size_t, CUstream))                             \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void*, size_t, CUstream))      \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, CUdeviceptr, size_t, CUstream))              \
  X(stream_create, "cuStreamCreate", (CUstream*, unsigned int))                                \
  X(stream_synchronize, "cuStreamSynchronize", (CUstream))                                     \
  X(stream_destroy, "cuStreamDestroy_v2", (CUstream))                                          \
  X(ctx_synchronize, "cuCtxSynchronize", (void))                                               \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int*))                        \
  X(launch_kernel, "cuLaunchKernelEx", (const launch_config*, CUfunction, void**, void**))

typedef struct {
#define EP_MEMBER(name, symbol, arguments) CUresult(*name) arguments;
  EP_DRIVER_CALLS(EP_MEMBER)
#undef EP_MEMBER
  CUresult (*get_error_string)(CUresult, const char**);
} driver_calls;

/* Find the driver, once a process; NULL if there is none, which *problem then names. */
const driver_calls* find_driver(const char** problem);

#endif
