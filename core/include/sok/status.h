/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes and the error message of the calling thread. */
#ifndef SOK_STATUS_H_
#define SOK_STATUS_H_

#include "sok/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every function of this library returns one of these as an int. Numbers are part of the ABI. A function that does not
 * return SOK_OK has changed no table, state or output that its comment does not name as undefined on error. */
typedef enum sok_status {
  SOK_OK = 0,
  SOK_INVALID_ARGUMENT = 1,    /* a shape, dtype, option or pointer that can never be right */
  SOK_OUT_OF_RANGE = 2,        /* a key outside its table, a slot outside its shard */
  SOK_RESOURCE_EXHAUSTED = 3,  /* an allocator or the operating system had no memory */
  SOK_FAILED_PRECONDITION = 4, /* right arguments at the wrong time: a handle already closed, a table not built */
  SOK_UNIMPLEMENTED = 5,       /* this build cannot do it: a CUDA device without CUDA, a dtype not compiled */
  SOK_UNAVAILABLE = 6,         /* a device, driver or peer that does not answer */
  SOK_INTERNAL = 7             /* a fault of this library; please report it with the message */
} sok_status;

/* The message of the last call of this thread that failed: English, UTF-8, never NULL, "" when none failed yet. Owned
 * by the library and valid until the next call of this thread. Does not block. */
SOK_EXPORT const char* sok_last_error_message(void);

/* The name of a code, "SOK_OK" ..., or "unknown status" for any other number. A static string. */
SOK_EXPORT const char* sok_status_name(int status);

#ifdef __cplusplus
}
#endif
#endif /* SOK_STATUS_H_ */
