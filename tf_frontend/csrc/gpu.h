// SPDX-License-Identifier: Apache-2.0
// What an op on a GPU needs of TensorFlow, and how kernels are registered for both devices.
//
// TensorFlow runs all ops of a GPU on one compute stream, so what an op enqueues is ordered by when it is enqueued, and
// memory that is freed may be used again at once by what is enqueued later. Everything here relies on that.
#ifndef SOK_TENSORFLOW_GPU_H_
#define SOK_TENSORFLOW_GPU_H_

#include <cstddef>
#include <cstdint>

#include "support.h"

namespace stream_executor {
class StreamExecutor;
}

namespace sok::tf {

// Whether the op runs on a GPU. Always false in a build without CUDA.
bool OnGpu(OpKernelContext* ctx);

// The CUDA ordinal of the op's GPU, and TensorFlow's stream of it (a cudaStream_t).
int GpuIndex(OpKernelContext* ctx);
void* GpuStream(OpKernelContext* ctx);

// Blocks until the work enqueued so far is done.
absl::Status WaitForGpu(OpKernelContext* ctx);

// The GPU of an op, for what outlives it.
class Gpu {
 public:
  explicit Gpu(OpKernelContext* ctx);
  // Blocks until it has done all work. Nothing where the op ran on the CPU.
  void Wait() const;

 private:
  stream_executor::StreamExecutor* executor_;
};

// Copies between tensors of the same size, in host memory or where the op runs. Where both are on the op's GPU the copy
// is enqueued; the others block until it is done, after all work enqueued before.
absl::Status CopyOnDevice(OpKernelContext* ctx, const Tensor& from, Tensor* to);
absl::Status CopyToHost(OpKernelContext* ctx, const void* from, Tensor* to);
absl::Status CopyFromHost(OpKernelContext* ctx, const Tensor& from, Tensor* to);

// Writes 32 bits again and again to memory where the op runs; on a GPU it is enqueued.
absl::Status Fill(OpKernelContext* ctx, void* memory, uint32_t pattern, size_t bytes);

// The error of a call that takes memory of its own for dynamic tables; of one on a GPU it says who may have all of it.
absl::Status OfMemory(OpKernelContext* ctx, const absl::Status& status);

// A temporary tensor in host memory, wherever the op runs.
absl::Status AllocateHost(OpKernelContext* ctx, ::tensorflow::DataType type, const ::tensorflow::TensorShape& shape,
                          Tensor* tensor);

}  // namespace sok::tf

// Registers the kernel CLASS of the op NAME for the CPU and, in a build with CUDA, for GPUs. What follows are the
// `.HostMemory("...")` of inputs and outputs that lie in host memory on both; resources and strings always do.
#if defined(SOK_WITH_CUDA)
#define SOK_REGISTER_KERNELS(NAME, CLASS, ...)                                             \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(::tensorflow::DEVICE_CPU) __VA_ARGS__, CLASS); \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(::tensorflow::DEVICE_GPU) __VA_ARGS__, CLASS)
#else
#define SOK_REGISTER_KERNELS(NAME, CLASS, ...) \
  REGISTER_KERNEL_BUILDER(Name(NAME).Device(::tensorflow::DEVICE_CPU) __VA_ARGS__, CLASS)
#endif

#endif  // SOK_TENSORFLOW_GPU_H_
