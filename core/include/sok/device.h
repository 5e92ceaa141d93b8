/* SPDX-License-Identifier: Apache-2.0 */
/* What devices there are. None of these starts CUDA on a device: no context is made and no memory is taken. */
#ifndef SOK_DEVICE_H_
#define SOK_DEVICE_H_

#include "sok/export.h"
#include "sok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sok_device_properties {
  size_t struct_size;         /* sizeof(sok_device_properties), set by the caller */
  char name[256];             /* "NVIDIA H200", or the CPU's instruction set in use */
  int64_t total_memory;       /* bytes; 0 for the CPU */
  int32_t compute_capability; /* 10 * major + minor; 0 for the CPU */
  int32_t multiprocessors;    /* 0 for the CPU */
} sok_device_properties;

/* 1 when the library was built with CUDA, whether or not this host has a GPU; else 0. */
SOK_EXPORT int sok_built_with_cuda(void);

/* Writes to *count the number of CUDA devices: 0 without CUDA in the build, without a driver, or without a GPU. */
SOK_EXPORT int sok_cuda_device_count(int32_t* count);

/* Fills *properties. Errors: SOK_INVALID_ARGUMENT (no such device), SOK_UNIMPLEMENTED (CUDA not built),
 * SOK_UNAVAILABLE (the driver does not answer). */
SOK_EXPORT int sok_device_get_properties(sok_device device, sok_device_properties* properties);

#ifdef __cplusplus
}
#endif
#endif /* SOK_DEVICE_H_ */
