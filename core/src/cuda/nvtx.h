// SPDX-License-Identifier: Apache-2.0
// Ranges of NVIDIA's tools, in the domain "sok", for code that is compiled without CUDA's headers. Where no tool is in
// the process they take a few nanoseconds.
#ifndef SOK_CUDA_NVTX_H_
#define SOK_CUDA_NVTX_H_

namespace sok::cuda {

// On the calling thread; each push has its pop there.
void push_range(const char* name) noexcept;
void pop_range() noexcept;

}  // namespace sok::cuda

#endif  // SOK_CUDA_NVTX_H_
