/* SPDX-License-Identifier: Apache-2.0 */
/* Version of the library and what it was built with. */
#ifndef SOK_VERSION_H_
#define SOK_VERSION_H_

#include "sok/export.h"

/* Raised when a struct or function changes so that an older caller would misread it. A frontend compares this with
 * sok_abi_version() when it loads the library and refuses another number. */
#define SOK_ABI_VERSION 5

#ifdef __cplusplus
extern "C" {
#endif

/* SOK_ABI_VERSION of the library that was loaded. */
SOK_EXPORT int sok_abi_version(void);

/* "MAJOR.MINOR.PATCH"; a static string. */
SOK_EXPORT const char* sok_version(void);

/* One line for people and bug reports: version, compiler, instruction set in use ("avx512", "avx2", "baseline"), CUDA
 * version and architectures or "no CUDA". A static string. */
SOK_EXPORT const char* sok_build_info(void);

#ifdef __cplusplus
}
#endif
#endif /* SOK_VERSION_H_ */
