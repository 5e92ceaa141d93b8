// SPDX-License-Identifier: Apache-2.0
// Functions that the CPU and a device share.
#ifndef SOK_COMMON_HOST_DEVICE_H_
#define SOK_COMMON_HOST_DEVICE_H_

#ifdef __CUDACC__
#define SOK_HOST_DEVICE __host__ __device__
#else
#define SOK_HOST_DEVICE
#endif

#endif  // SOK_COMMON_HOST_DEVICE_H_
