// SPDX-License-Identifier: Apache-2.0
// Addresses that stay while the memory behind them grows and shrinks (sok/reserved_range.h): when memory is taken, and
// what happens where there is none, for both backends.
#ifndef SOK_TABLE_RESERVED_RANGE_H_
#define SOK_TABLE_RESERVED_RANGE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "sok/reserved_range.h"

struct sok_reserved_range {
  virtual ~sok_reserved_range() = default;
  sok_reserved_range(const sok_reserved_range&) = delete;
  sok_reserved_range& operator=(const sok_reserved_range&) = delete;

  char* data() const { return data_; }
  int64_t reserved_bytes() const { return reserved_; }
  int64_t backed_bytes() const { return backed_; }
  int64_t host_bytes() const { return backed_ > device_bytes_ ? backed_ - device_bytes_ : 0; }
  sok_device device() const { return device_; }

  // Both throw Error; after one of grow as many bytes are backed as before.
  void grow(int64_t bytes);
  // At once: who waits for work on the part that goes is the caller.
  void shrink(int64_t bytes);

 protected:
  // `page`: what memory comes in multiples of. `largest_share`: the most that is backed ahead of what is asked for.
  // `whole_chunks`: it goes back in the pieces in which back() brought it.
  sok_reserved_range(const sok_reserved_range_config& config, int64_t page, int64_t largest_share, bool whole_chunks);

  // Puts memory behind whole pages from `begin`, where what is backed ends, all of one kind: the host's from
  // device_bytes on. False, with nothing changed: there is none. Throws Error for any other failure, with nothing
  // changed.
  virtual bool back(int64_t begin, int64_t bytes) = 0;

  // Takes the memory from `begin`, or from the next place where it can, to the end. Returns the place.
  virtual int64_t give_back(int64_t begin) = 0;

  // What a message about missing memory ends with: how much there is, what to set.
  virtual std::string advice() const = 0;

  int64_t round_up(int64_t bytes) const { return (bytes + page_ - 1) / page_ * page_; }
  int64_t device_bytes() const { return device_bytes_; }

  char* data_ = nullptr;  // set by the backend's constructor

 private:
  // How many bytes to back where so many are lacking. Where single pages go back, and the share is the largest, the
  // chunk ends at a multiple of it: of the CPU's huge pages none would be whole otherwise.
  int64_t chunk_for(int64_t share, int64_t lacking) const;

  const std::string name_;
  const sok_device device_;
  const int64_t page_, largest_share_;
  const bool whole_chunks_;
  const int64_t reserved_;
  const int64_t device_bytes_;  // more than all where there is one memory
  int64_t backed_ = 0;
};

namespace sok {

using ReservedRange = sok_reserved_range;

// Throws Error. A CUDA device is the current one in every call of the range, also when it is destroyed.
std::unique_ptr<ReservedRange> reserve_range(const sok_reserved_range_config& config);

}  // namespace sok

namespace sok::cpu {

std::unique_ptr<ReservedRange> reserve_range(const sok_reserved_range_config& config);

}  // namespace sok::cpu

#ifdef SOK_WITH_CUDA
namespace sok::cuda {

std::unique_ptr<ReservedRange> reserve_range(const sok_reserved_range_config& config);

}  // namespace sok::cuda
#endif

#endif  // SOK_TABLE_RESERVED_RANGE_H_
