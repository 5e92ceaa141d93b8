// SPDX-License-Identifier: Apache-2.0
// Addresses are a mapping that allows no access; memory is behind those that are made accessible, page by page as they
// are touched.
#include "table/reserved_range.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "common/status.h"

namespace sok::cpu {
namespace {

// Not MAP_NORESERVE: the kernel compares what is made accessible at once with what it has, so that a range that cannot
// be had is refused when it grows, and no process is killed when it is filled.
constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS;

// A huge page. Filling it takes a hundred times as long as asking for it.
constexpr int64_t kLargestShare = int64_t{2} << 20;

class Range final : public ReservedRange {
 public:
  explicit Range(const sok_reserved_range_config& config)
      : ReservedRange(config, sysconf(_SC_PAGESIZE), kLargestShare, false) {
    void* const found = mmap(nullptr, size(reserved_bytes()), PROT_NONE, kFlags, -1, 0);
    SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED, found != MAP_FAILED, "no ", reserved_bytes(), " bytes of addresses for ",
                     config.name != nullptr ? config.name : "a range", ": ", std::strerror(errno), "; ", kLimits);
    data_ = static_cast<char*>(found);
    ask_for_huge_pages(0, reserved_bytes());
  }

  ~Range() override { munmap(data_, size(reserved_bytes())); }

 protected:
  bool back(int64_t begin, int64_t bytes) override {
    if (mprotect(data_ + begin, size(bytes), PROT_READ | PROT_WRITE) == 0) return true;
    SOK_CHECK_STATUS(SOK_INTERNAL, errno == ENOMEM, "mprotect: ", std::strerror(errno));
    return false;
  }

  int64_t give_back(int64_t begin) override {
    // A new mapping in place of the old one. madvise would take the memory, but not what was promised.
    void* const place = data_ + begin;
    const size_t bytes = size(backed_bytes() - begin);
    SOK_CHECK_STATUS(SOK_RESOURCE_EXHAUSTED,
                     bytes == 0 || mmap(place, bytes, PROT_NONE, kFlags | MAP_FIXED, -1, 0) == place,
                     "mmap: ", std::strerror(errno), "; ", kLimits);
    ask_for_huge_pages(begin, backed_bytes() - begin);
    return begin;
  }

  std::string advice() const override { return kLimits; }

 private:
  // Rows are read at random, each on a page of its own: with small pages that costs an access to the page tables too. A
  // kernel without huge pages refuses, and that is all.
  void ask_for_huge_pages(int64_t begin, int64_t bytes) {
    if (bytes > 0) madvise(data_ + begin, size(bytes), MADV_HUGEPAGE);
  }

  static constexpr const char* kLimits =
      "the limits are the machine's memory, vm.overcommit_memory and vm.max_map_count (sysctl), and ulimit -v and -d";

  static size_t size(int64_t bytes) { return static_cast<size_t>(bytes); }
};

}  // namespace

std::unique_ptr<ReservedRange> reserve_range(const sok_reserved_range_config& config) {
  return std::make_unique<Range>(config);
}

}  // namespace sok::cpu
