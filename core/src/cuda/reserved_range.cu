// SPDX-License-Identifier: Apache-2.0
// Each chunk is memory of its own, mapped where the one before it ends; the driver unmaps whole ones only.
#include "table/reserved_range.h"

#include <vector>

#include "common/status.h"
#include "cuda/virtual_memory.h"

namespace sok::cuda {
namespace {

constexpr int64_t kLargestShare = int64_t{1} << 30;

class Range final : public ReservedRange {
 public:
  explicit Range(const sok_reserved_range_config& config)
      : ReservedRange(config, memory_granularity(config.device.index), kLargestShare, true) {
    data_ = static_cast<char*>(reserve_addresses(reserved_bytes()));
    SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED, data_ != nullptr, "no ", reserved_bytes(), " bytes of addresses for ",
                     config.name != nullptr ? config.name : "a range", " on CUDA device ", config.device.index);
  }

  ~Range() override {
    try {
      give_back(0);
    } catch (const Error&) {  // a process that ends may have ended CUDA before
      return;
    }
    free_addresses(data_, reserved_bytes());
  }

 protected:
  bool back(int64_t begin, int64_t bytes) override {
    chunks_.reserve(chunks_.size() + 1);
    const Memory kind = begin < device_bytes() ? Memory::kDevice : Memory::kHost;
    if (!map_memory(kind, device().index, data_ + begin, bytes)) return false;
    chunks_.push_back({begin, bytes});
    return true;
  }

  int64_t give_back(int64_t begin) override {
    while (!chunks_.empty() && chunks_.back().begin >= begin) {
      unmap_memory(data_ + chunks_.back().begin, chunks_.back().bytes);
      chunks_.pop_back();
    }
    return chunks_.empty() ? 0 : chunks_.back().begin + chunks_.back().bytes;
  }

  std::string advice() const override {
    if (backed_bytes() >= device_bytes()) return "page-locked memory of the host is limited by what it has free";
    const DeviceMemory memory = device_memory();
    return "CUDA device " + std::to_string(device().index) + " has " + std::to_string(memory.free) + " of " +
           std::to_string(memory.total) +
           " bytes free. TensorFlow takes a GPU's memory when it starts unless TF_FORCE_GPU_ALLOW_GROWTH=true is set, "
           "and PyTorch keeps what its tensors leave until torch.cuda.empty_cache()";
  }

 private:
  struct Chunk {
    int64_t begin, bytes;
  };
  std::vector<Chunk> chunks_;
};

}  // namespace

std::unique_ptr<ReservedRange> reserve_range(const sok_reserved_range_config& config) {
  return std::make_unique<Range>(config);
}

}  // namespace sok::cuda
