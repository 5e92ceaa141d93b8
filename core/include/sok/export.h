/* SPDX-License-Identifier: Apache-2.0 */
/* SOK_EXPORT marks the symbols that libsok_core exports; the library is built with hidden visibility. */
#ifndef SOK_EXPORT_H_
#define SOK_EXPORT_H_

#if defined(__GNUC__)
#define SOK_EXPORT __attribute__((visibility("default")))
#else
#define SOK_EXPORT
#endif

#endif /* SOK_EXPORT_H_ */
