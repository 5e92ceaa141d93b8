// SPDX-License-Identifier: Apache-2.0
#include "cuda/report.cuh"

namespace sok::cuda {

Report::Report(const Scope& scope) : scope_(scope), record_(scope.context().errors) {
  if (record_ != nullptr) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SOK_CUDA_CHECK(cudaStreamIsCapturing(scope.stream(), &status));
  SOK_CHECK_STATUS(SOK_FAILED_PRECONDITION, status == cudaStreamCaptureStatusNone,
                   "the stream is being captured in a CUDA graph: set "
                   "context.errors, since this call cannot wait there to "
                   "see whether its keys are right");
  own_ = Buffer<sok_error_record>(scope.context(), 1);
  record_ = own_.data();
  SOK_CUDA_CHECK(cudaMemsetAsync(record_, 0, sizeof(sok_error_record), scope.stream()));
}

Finding Report::read() const {
  if (own_.data() == nullptr) return {};
  sok_error_record found = {};
  SOK_CUDA_CHECK(cudaMemcpyAsync(&found, record_, sizeof(found), cudaMemcpyDeviceToHost, scope_.stream()));
  SOK_CUDA_CHECK(cudaStreamSynchronize(scope_.stream()));
  return find_recorded(found);
}

void Report::finish(const TableId& table) const { throw_found(read(), table.name); }

void Report::finish() const { throw_found(read(), nullptr); }

}  // namespace sok::cuda
