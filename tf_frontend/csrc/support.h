// SPDX-License-Identifier: Apache-2.0
// What every kernel needs to call the core: a context made from the kernel's, views of tensors, and statuses.
#ifndef SOK_TENSORFLOW_SUPPORT_H_
#define SOK_TENSORFLOW_SUPPORT_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "sok/sok.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tsl/profiler/lib/traceme.h"

namespace sok::tf {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;

// Errors with a message that is put together from its parts.
namespace errors {
template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status FailedPrecondition(const Parts&... parts) {
  return absl::FailedPreconditionError(absl::StrCat(parts...));
}
template <typename... Parts>
absl::Status Unimplemented(const Parts&... parts) {
  return absl::UnimplementedError(absl::StrCat(parts...));
}
}  // namespace errors

// The TensorFlow error of a sok_status. Keys outside a table become INVALID_ARGUMENT: OUT_OF_RANGE means "end of the
// data" to TensorFlow, and Keras ends an epoch on it without a word.
absl::Status ToStatus(int code, const std::string& message);

// ToStatus with the message that the core left for this thread.
absl::Status ToStatus(int code);

// What a function of the core gives, within a range that has its name in TensorFlow's profiler.
//   call  its text, "sok_<stage>(..."
template <typename Function>
absl::Status Traced(absl::string_view call, const Function& function) {
  const tsl::profiler::TraceMe range([call] { return std::string(call.substr(0, call.find('('))); });
  return ToStatus(function());
}

// Views. The tensor must outlive the view. Ranks above 2 are flattened to one dimension.
sok_tensor View(const Tensor& tensor);
sok_tensor Absent();

// A sok_context whose temporary memory, threads and stream are those of the kernel, and whose error record is that of
// its GPU. It lives on the kernel's stack.
class CoreContext {
 public:
  explicit CoreContext(OpKernelContext* ctx);
  CoreContext(const CoreContext&) = delete;
  CoreContext& operator=(const CoreContext&) = delete;
  const sok_context* get() const { return &context_; }

 private:
  static void* Allocate(void* self, size_t bytes);
  static void Release(void* self, void* memory);

  OpKernelContext* ctx_;
  std::deque<Tensor> temporaries_;
  sok_context context_;
};

// Reads an attribute; OP_REQUIRES_OK for constructors of classes that are not kernels.
template <typename T>
T Attribute(OpKernelConstruction* ctx, const char* name) {
  T value{};
  absl::Status status = ctx->GetAttr(name, &value);
  if (!status.ok()) ctx->CtxFailure(status);
  return value;
}

}  // namespace sok::tf

// Calls a function of the core, "sok_<stage>(...)": the error, if there is one.
#define SOK_TF_STATUS(CALL) ::sok::tf::Traced(#CALL, [&] { return CALL; })

// The same; an error ends the kernel.
#define SOK_TF_CALL(CTX, CALL) OP_REQUIRES_OK(CTX, SOK_TF_STATUS(CALL))

#endif  // SOK_TENSORFLOW_SUPPORT_H_
