// SPDX-License-Identifier: Apache-2.0
// The core's communicator as a resource of TensorFlow.
#ifndef SOK_TENSORFLOW_COMMUNICATORS_H_
#define SOK_TENSORFLOW_COMMUNICATORS_H_

#include <atomic>
#include <string>

#include "sok/communicator.h"
#include "support.h"
#include "tensorflow/core/framework/resource_base.h"

namespace sok::tf {

// Refers to a communicator, which Python owns and closes. Functions keep this alive for as long as they live.
class CommunicatorResource : public ::tensorflow::ResourceBase {
 public:
  explicit CommunicatorResource(sok_communicator* communicator) : communicator_(communicator) {}
  std::string DebugString() const override { return "SokCommunicator"; }

  sok_communicator* get() const { return communicator_; }
  void Forget() { communicator_ = nullptr; }

 private:
  std::atomic<sok_communicator*> communicator_;
};

// The communicator of a handle; of an op's input 0. Fails when it was closed.
absl::Status GetCommunicator(const Tensor& handle, sok_communicator** communicator);
absl::Status GetCommunicator(OpKernelContext* ctx, sok_communicator** communicator);

}  // namespace sok::tf

#endif  // SOK_TENSORFLOW_COMMUNICATORS_H_
