#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static driver_calls calls;
static char trouble[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A pointer to a function is no pointer to an object in C, though dlsym gives one. */
static void find(void* library, const char* symbol, void* place, size_t size) {
  void* found = dlsym(library, symbol);
  if (found == NULL && trouble[0] == '\0') {
    snprintf(trouble, sizeof trouble, "libcuda.so.1 has no %s: the driver is older than CUDA 12.3",
             symbol);
  }
  memcpy(place, &found, size);
}

static void look(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    snprintf(trouble, sizeof trouble, "no CUDA driver: %s", dlerror());
    return;
  }
#define EP_FIND(name, symbol, arguments) find(library, symbol, &calls.name, sizeof calls.name);
  EP_DRIVER_CALLS(EP_FIND)
#undef EP_FIND
  find(library, "cuGetErrorString", &calls.get_error_string, sizeof calls.get_error_string);
}

const driver_calls* find_driver(const char** problem) {
  pthread_once(&once, look);
  *problem = trouble;
  return trouble[0] == '\0' ? &calls : NULL;
}
