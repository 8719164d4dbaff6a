#include "ep.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "tables.h"

/* Room for what a library says of itself in JSON, and the words around it. */
static _Thread_local char last_error[640];

ep_status fail(ep_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof last_error, format, arguments);
  va_end(arguments);
  return status;
}

ep_status fail_driver(const driver_calls* cuda, const char* call, CUresult result) {
  const char* words = NULL;
  cuda->get_error_string(result, &words);
  return fail(EP_ERROR_DRIVER, "%s: %s (%d)", call, words == NULL ? "unknown" : words, result);
}

/* For calls that nothing needs to be undone for. */
#define TRY(cuda, name, result)                                    \
  do {                                                             \
    CUresult result_ = (result);                                   \
    if (result_ != 0) return fail_driver((cuda), (name), result_); \
  } while (0)

uint32_t ep_abi_version(void) { return EP_ABI_VERSION; }
const char* ep_config_id(void) { return EP_CONFIG_ID; }
const char* ep_config(void) { return CONFIG_JSON; }
uint64_t ep_buffer_bytes(void) { return EP_BUFFER_BYTES; }
const char* ep_last_error(void) { return last_error; }

const char* ep_status_text(ep_status status) {
  switch (status) {
    case EP_OK: return "all is well";
    case EP_ERROR_ARGUMENT: return "an argument is not allowed";
    case EP_ERROR_ABI: return "header, library and caller do not fit together";
    case EP_ERROR_ORDER:
      return "this call is not next: dispatch and combine take turns, after ep_arm";
    case EP_ERROR_DEVICE: return "this GPU cannot run the exchange";
    case EP_ERROR_DRIVER: return "the CUDA driver refused a call";
    case EP_TIMED_OUT: return "a wait of a kernel has expired; ep_poll says for whom";
  }
  return "no status of ep";
}

ep_status ep_field(const char* name, uint64_t* offset_bytes, uint64_t* size_bytes) {
  for (size_t index = 0; name != NULL && index < sizeof FIELDS / sizeof *FIELDS; index++) {
    if (strcmp(FIELDS[index].name, name) != 0) continue;
    if (offset_bytes != NULL) *offset_bytes = FIELDS[index].offset_bytes;
    if (size_bytes != NULL) *size_bytes = FIELDS[index].size_bytes;
    return EP_OK;
  }
  return fail(EP_ERROR_ARGUMENT, "the buffer has no field %.60s; it has " FIELD_NAMES,
              name == NULL ? "(null)" : name);
}

static ep_status check_options(const ep_options* options) {
  if (options->size_bytes != sizeof *options) {
    return fail(EP_ERROR_ABI,
                "ep_options has %zu bytes, this library's has %zu; begin with EP_OPTIONS_INIT and "
                "compile with the ep.h that was exported with the library",
                options->size_bytes, sizeof *options);
  }
  if (options->abi_version != EP_ABI_VERSION) {
    return fail(EP_ERROR_ABI, "the caller was compiled for ABI version %u, this library has %u",
                options->abi_version, EP_ABI_VERSION);
  }
  if (options->config_id == NULL || strcmp(options->config_id, EP_CONFIG_ID) != 0) {
    return fail(
        EP_ERROR_ABI,
        "the caller was compiled for config %.40s, this library is %s, which is %s; use the ep.h "
        "that was exported with it",
        options->config_id == NULL ? "(null)" : options->config_id, EP_CONFIG_ID, CONFIG_JSON);
  }
  if (options->rank < 0 || options->rank >= EP_RANKS) {
    return fail(EP_ERROR_ARGUMENT, "rank is %d; allowed is 0..%d", options->rank, EP_RANKS - 1);
  }
  if (options->timeout_us == 0 || options->timeout_us > MAX_TIMEOUT_US ||
      options->grace_us > MAX_TIMEOUT_US) {
    return fail(EP_ERROR_ARGUMENT,
                "timeout_us and grace_us are %llu and %llu; allowed is at most %llu, and the first "
                "is above 0",
                (unsigned long long)options->timeout_us, (unsigned long long)options->grace_us,
                (unsigned long long)MAX_TIMEOUT_US);
  }
  if (options->ranks_on_gpu < 1 || options->ranks_on_gpu > EP_RANKS || options->reserved != 0) {
    return fail(EP_ERROR_ARGUMENT, "ranks_on_gpu is %d, reserved %d; allowed are 1..%d, and 0",
                options->ranks_on_gpu, options->reserved, EP_RANKS);
  }
  return EP_OK;
}

/* The own entry of the peers is not looked at. */
static uint64_t address_of(const ep_options* options, int rank) {
  return rank == options->rank ? options->own : options->peers[rank];
}

static ep_status check_addresses(const ep_options* options) {
  if (options->peers == NULL) {
    return fail(EP_ERROR_ARGUMENT, "peers is NULL; it has an address for each of %d ranks",
                EP_RANKS);
  }
  for (int rank = 0; rank < EP_RANKS; rank++) {
    uint64_t address = address_of(options, rank);
    if (address == 0 || address > INT64_MAX || address % EP_BUFFER_ALIGN != 0) {
      return fail(EP_ERROR_ARGUMENT,
                  "the buffer of rank %d is at %#llx; allowed is a device address that is a "
                  "multiple of %d",
                  rank, (unsigned long long)address, EP_BUFFER_ALIGN);
    }
    for (int other = 0; other < rank; other++) {
      uint64_t theirs = address_of(options, other);
      uint64_t distance = address > theirs ? address - theirs : theirs - address;
      if (distance < EP_BUFFER_BYTES) {
        return fail(EP_ERROR_ARGUMENT,
                    "the buffers of ranks %d and %d overlap, at %#llx and %#llx; each has "
                    "EP_BUFFER_BYTES of its own",
                    other, rank, (unsigned long long)theirs, (unsigned long long)address);
      }
    }
  }
  return EP_OK;
}

static const kernel_image* find_image(const char* arch, int kind, bool starts_early) {
  for (size_t index = 0; index < sizeof IMAGES / sizeof *IMAGES; index++) {
    const kernel_image* image = &IMAGES[index];
    if (image->kind == kind && image->starts_early == starts_early &&
        strcmp(image->arch, arch) == 0) {
      return image;
    }
  }
  return NULL;
}

static ep_status load_kernel(ep_exchange* made, const kernel_image* image, int32_t sms,
                             int32_t ranks_on_gpu) {
  const driver_calls* cuda = made->cuda;
  loaded_kernel* kernel = &made->kernels[image->kind];
  CUkernel handle;
  CUfunction function;
  int per_sm = 0;
  TRY(cuda, "cuLibraryLoadData",
      cuda->library_load_data(&kernel->library, image->cubin, NULL, NULL, 0, NULL, NULL, 0));
  TRY(cuda, "cuLibraryGetKernel", cuda->library_get_kernel(&handle, kernel->library, image->entry));
  /* Loads it into this context now, so that a graph capture need not. */
  TRY(cuda, "cuKernelGetFunction", cuda->kernel_get_function(&function, handle));
  TRY(cuda, "cuOccupancyMaxActiveBlocksPerMultiprocessor",
      cuda->occupancy(&per_sm, function, (int)image->threads, 0));
  kernel->function = function;
  kernel->threads = image->threads;
  kernel->resident = per_sm * sms / ranks_on_gpu - HERALDS;
  if (kernel->resident < 2) kernel->resident = 2;
  return EP_OK;
}

static ep_status load_kernels(ep_exchange* made, int32_t ranks_on_gpu) {
  const driver_calls* cuda = made->cuda;
  CUdevice device;
  int major, minor, sms;
  TRY(cuda, "cuCtxGetCurrent", cuda->ctx_get_current(&made->context));
  if (made->context == NULL) {
    return fail(EP_ERROR_DEVICE,
                "no CUDA context is current; make one (cudaSetDevice and cudaFree(0), say) before "
                "ep_open");
  }
  TRY(cuda, "cuCtxGetDevice", cuda->ctx_get_device(&device));
  TRY(cuda, "cuDeviceGetAttribute",
      cuda->device_get_attribute(&major, DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
  TRY(cuda, "cuDeviceGetAttribute",
      cuda->device_get_attribute(&minor, DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
  TRY(cuda, "cuDeviceGetAttribute",
      cuda->device_get_attribute(&sms, DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
  char arch[32];
  snprintf(arch, sizeof arch, "sm_%d%da", major, minor);
  made->sms = (double)sms / ranks_on_gpu;
  for (size_t index = 0; TUNING[index].arch != NULL; index++) {
    if (strcmp(TUNING[index].arch, arch) == 0) made->tuning = &TUNING[index];
  }
  for (int kind = 0; kind < NUM_KERNELS; kind++) {
    const kernel_image* image = find_image(arch, kind, made->starts_early);
    if (image == NULL) {
      return fail(EP_ERROR_DEVICE,
                  "this library has no %skernels for %s; it is %s: export it with that --arch%s",
                  made->starts_early ? "" : "shared-GPU ", arch, CONFIG_JSON,
                  made->starts_early ? "" : " and without --no-sharing");
    }
    ep_status status = load_kernel(made, image, sms, ranks_on_gpu);
    if (status != EP_OK) return status;
  }
  return EP_OK;
}

static ep_status take_memory(ep_exchange* made) {
  const driver_calls* cuda = made->cuda;
  void* record = NULL;
  TRY(cuda, "cuMemAlloc", cuda->mem_alloc(&made->table, sizeof(uint64_t) * (EP_RANKS + 1)));
  TRY(cuda, "cuMemHostAlloc",
      cuda->mem_host_alloc(&record, sizeof(uint32_t) * RECORD_WORDS,
                           MEMHOSTALLOC_PORTABLE | MEMHOSTALLOC_DEVICEMAP));
  made->record = record;
  memset(made->record, 0, sizeof(uint32_t) * RECORD_WORDS);
  TRY(cuda, "cuMemHostGetDevicePointer",
      cuda->mem_host_get_device_pointer(&made->record_device, record, 0));
  return EP_OK;
}

/* Not ep_close: where several libraries are loaded, that name may be another's. */
static void give_back(ep_exchange* exchange) {
  const driver_calls* cuda = exchange->cuda;
  for (int kind = 0; kind < NUM_KERNELS; kind++) {
    if (exchange->kernels[kind].library != NULL)
      cuda->library_unload(exchange->kernels[kind].library);
  }
  if (exchange->table != 0) cuda->mem_free(exchange->table);
  if (exchange->record != NULL) cuda->mem_free_host(exchange->record);
  free(exchange);
}

ep_status ep_open(const ep_options* options, ep_exchange** opened) {
  if (opened != NULL) *opened = NULL;
  if (options == NULL || opened == NULL) {
    return fail(EP_ERROR_ARGUMENT, "ep_open takes options and where the exchange goes, not NULL");
  }
  ep_status status = check_options(options);
  if (status == EP_OK) status = check_addresses(options);
  if (status != EP_OK) return status;
  const char* problem;
  const driver_calls* cuda = find_driver(&problem);
  if (cuda == NULL) return fail(EP_ERROR_DEVICE, "%s", problem);
  ep_exchange* made = calloc(1, sizeof *made);
  if (made == NULL) return fail(EP_ERROR_DRIVER, "out of memory");
  made->cuda = cuda;
  made->rank = options->rank;
  made->own = options->own;
  memcpy(made->peers, options->peers, sizeof made->peers);
  made->peers[made->rank] = options->own;
  made->timeout_ns = options->timeout_us * 1000;
  made->grace_ns = options->grace_us * 1000;
  made->starts_early = options->ranks_on_gpu == 1;
  made->sent_tokens = -1;
  status = load_kernels(made, options->ranks_on_gpu);
  if (status == EP_OK) status = take_memory(made);
  if (status != EP_OK) {
    give_back(made);
    return status;
  }
  *opened = made;
  return EP_OK;
}

ep_status ep_close(ep_exchange* exchange) {
  if (exchange != NULL) give_back(exchange);
  return EP_OK;
}

static uint32_t word_of(const buffer_fill* fill, int32_t rank, uint64_t step) {
  switch (fill->unknown) {
    case WORD_EMPTY_ID: return (uint32_t)EMPTY_IDS[rank];
    case WORD_STEP_LOW: return (uint32_t)step;
    case WORD_STEP_HIGH: return (uint32_t)(step >> 32);
    default: return fill->word;
  }
}

static bool is_excluded(const ep_arming* arming, int rank) {
  return arming->excluded[rank / 64] >> (rank % 64) & 1;
}

ep_status ep_arm(ep_exchange* exchange, const ep_arming* arming) {
  static const ep_arming as_new = EP_ARMING_INIT;
  if (exchange == NULL) return fail(EP_ERROR_ARGUMENT, "the exchange is NULL");
  if (arming == NULL) arming = &as_new;
  if (arming->size_bytes != sizeof *arming) {
    return fail(EP_ERROR_ABI,
                "ep_arming has %zu bytes, this library's has %zu; begin with "
                "EP_ARMING_INIT",
                arming->size_bytes, sizeof *arming);
  }
  const driver_calls* cuda = exchange->cuda;
  for (int rank = EP_RANKS; rank < (int)(8 * sizeof arming->excluded); rank++) {
    if (is_excluded(arming, rank)) {
      return fail(EP_ERROR_ARGUMENT, "rank %d is excluded; allowed is 0..%d", rank, EP_RANKS - 1);
    }
  }
  uint64_t table[EP_RANKS + 1];
  for (int rank = 0; rank < EP_RANKS; rank++) {
    bool is_out = is_excluded(arming, rank);
    if (is_out && rank == exchange->rank) {
      return fail(EP_ERROR_ARGUMENT, "rank %d excludes itself", rank);
    }
    table[rank] = is_out ? 0 : exchange->peers[rank];
  }
  table[EP_RANKS] = exchange->own;
  exchange->is_armed = false;
  TRY(cuda, "cuMemcpyHtoDAsync", cuda->copy_to_device(exchange->table, table, sizeof table, NULL));
  for (size_t index = 0; index < sizeof FILLS / sizeof *FILLS; index++) {
    const buffer_fill* fill = &FILLS[index];
    uint32_t word = word_of(fill, exchange->rank, arming->step);
    CUdeviceptr to = exchange->own + fill->offset_bytes;
    if (fill->height == 1) {
      TRY(cuda, "cuMemsetD32Async", cuda->memset_words(to, word, fill->width_words, NULL));
    } else {
      TRY(cuda, "cuMemsetD2D32Async",
          cuda->memset_words_2d(to, fill->pitch_bytes, word, fill->width_words, fill->height,
                                NULL));
    }
  }
  TRY(cuda, "cuCtxSynchronize", cuda->ctx_synchronize());
  forget_hang(exchange);
  exchange->sent_tokens = -1;
  exchange->is_armed = true;
  return EP_OK;
}

ep_status ep_step(ep_exchange* exchange, uint64_t* step) {
  if (exchange == NULL || step == NULL) return fail(EP_ERROR_ARGUMENT, "an argument is NULL");
  if (!exchange->is_armed) {
    return fail(EP_ERROR_ORDER, "the buffer is not armed, and counts no steps: call ep_arm first");
  }
  const driver_calls* cuda = exchange->cuda;
  uint32_t words[2] = {0, 0};
  TRY(cuda, "cuCtxSynchronize", cuda->ctx_synchronize());
  TRY(cuda, "cuMemcpyDtoHAsync",
      cuda->copy_to_host(words, exchange->own + CONTROL_OFFSET, sizeof words, NULL));
  TRY(cuda, "cuStreamSynchronize", cuda->stream_synchronize(NULL));
  *step = words[0] | (uint64_t)words[1] << 32;
  return EP_OK;
}

ep_status ep_rows(const ep_exchange* exchange, ep_received* received) {
  if (exchange == NULL || received == NULL) return fail(EP_ERROR_ARGUMENT, "an argument is NULL");
  if (received->size_bytes != sizeof *received) {
    return fail(EP_ERROR_ABI,
                "ep_received has %zu bytes, this library's has %zu; begin with "
                "EP_RECEIVED_INIT",
                received->size_bytes, sizeof *received);
  }
  uintptr_t own = (uintptr_t)exchange->own;
  received->x = (const uint8_t*)(own + EP_OFFSET_X);
  received->scales = (const uint8_t*)(own + EP_OFFSET_SCALES);
  received->ids = (const int32_t*)(own + EP_OFFSET_IDS);
  received->weights = (const float*)(own + EP_OFFSET_WEIGHTS);
  received->source = (const int32_t*)(own + EP_OFFSET_HEADER);
  received->source_stride = HEADER_WORDS;
  return EP_OK;
}
