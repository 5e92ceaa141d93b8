// SPDX-License-Identifier: Apache-2.0
// The hash index of a dynamic table (sok/hash_index.h): its memory and how it grows, for every backend.
#ifndef SOK_TABLE_HASH_INDEX_H_
#define SOK_TABLE_HASH_INDEX_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/call.h"
#include "sok/hash_index.h"
#include "table/hash_layout.h"
#include "table/reserved_range.h"

namespace sok {

// How many segments there are. They grow from g * 2^e to (g + 1) * 2^e, 8 <= g < 16, in 2^e moves: of one group of g
// segments, the last that has not been moved, to g + 1 segments at a higher place. Before there are eight, in one move.
class HashSegments {
 public:
  // For `rows` keys; never more than for `capacity`.
  HashSegments(int64_t rows, int64_t capacity);

  int64_t count() const { return segments_; }
  int64_t next() const { return segments_ + (int64_t{1} << shift()); }
  int64_t most() const { return most_; }
  bool is_growing() const { return moved_ > 0; }
  // Segments that have memory and are in use.
  int64_t in_use() const { return is_growing() ? next() : segments_; }
  HashSpace space(void* buckets) const;

  // Keys that it takes as it is.
  int64_t rows() const;

  // Moves from `count` to `next` that have to be made, one after the other, so that it takes `rows` keys; when all are
  // made, and these are not enough, the next growth begins.
  int64_t moves_before(int64_t rows) const;
  // The group that a move takes next, and how many segments it has.
  int64_t group() const { return num_groups() - moved_ - 1; }
  int64_t group_segments() const { return segments_ >> shift(); }
  // Where what is in the group belongs from now on.
  void move();

 private:
  int shift() const;
  int64_t rows_of_move() const;
  int64_t num_groups() const { return int64_t{1} << shift(); }

  int64_t segments_, most_;
  int64_t moved_ = 0;  // groups, of those that the growth to `next` takes
};

class Eviction;
class Tiers;

// Keys of a call, and what becomes of them. Requests for one index have the same `eviction`.
struct HashRequest {
  sok_hash_index* index;
  Integers keys;
  int64_t* slots;
  uint8_t* is_new;  // or nullptr
  // find_or_insert: what gives up rows where the index is full; nullptr: that is an error.
  Eviction* eviction = nullptr;
  // find_or_insert, of an index that takes guests: 0 where a key that the index lacks is not to be inserted, but a
  // guest, with a slot until `release_guests`. Of a key that occurs more than once the first counts. nullptr: all are
  // inserted.
  uint8_t* allowed = nullptr;
  // erase, and on CUDA find_or_insert: 0 where a key is passed over, as if the call had not brought it; its slot is -1.
  // nullptr: none is.
  const uint8_t* asked = nullptr;
  // erase: the keys count as expired.
  bool expires = false;
  // find_or_insert, of the only request for an index: the keys that were given up and their slots, as many as
  // num_evictions() becomes more, in the order in which they went. Both [keys.size], or nullptr.
  int64_t* evicted_keys = nullptr;
  int64_t* evicted_slots = nullptr;
  // find_or_insert, on CUDA: is_new is kRepeated where a key that the call inserts occurs again.
  bool marks_repeats = false;
  static constexpr uint8_t kRepeated = 2;
};

}  // namespace sok

struct sok_hash_index {
  virtual ~sok_hash_index() = default;
  sok_hash_index(const sok_hash_index&) = delete;
  sok_hash_index& operator=(const sok_hash_index&) = delete;

  const std::string& name() const { return name_; }
  sok_device device() const { return device_; }
  int64_t capacity() const { return capacity_; }
  // Slots that there may ever be: of keys and guests.
  int64_t most_slots() const { return capacity_ + max_guests_; }
  int64_t bytes() const {
    return buckets_->backed_bytes() + keys_->backed_bytes() + free_->backed_bytes() +
           (guests_ != nullptr ? guests_->backed_bytes() : 0);
  }
  sok::HashSpace space() const { return segments_.space(buckets_->data()); }
  int64_t* keys() const { return reinterpret_cast<int64_t*>(keys_->data()); }
  const sok_index* as_index() const { return &seam_; }

  // The columns over its slots have memory for so many. A CUDA graph, which inserts again without growing them, is
  // given no others.
  int64_t slot_limit() const { return slot_limit_; }
  void limit_slots(int64_t slots) { slot_limit_ = slots; }

  // What moves its keys to other slots beside a step; a call that uses the index comes after that.
  void set_tiers(sok::Tiers* tiers) { tiers_ = tiers; }
  void join(const sok_context& context) const;

  // All throw Error, with nothing changed.
  virtual void reserve(const sok_context& context, int64_t rows) = 0;
  virtual void clear(const sok_context& context) = 0;
  virtual int64_t size(const sok_context& context) const = 0;
  virtual int64_t num_slots() const = 0;
  // Waits until the host has heard that no more than so many slots have been given out, or of all calls.
  virtual void hear(const sok_context& /*context*/, int64_t /*slots*/) const {}
  // Of keys, so far; on a device as far as the host has heard.
  virtual int64_t num_insertions() const = 0;
  virtual int64_t num_evictions() const = 0;
  virtual int64_t num_expirations() const = 0;
  virtual int64_t num_guests_ever() const = 0;
  int64_t max_guests() const { return max_guests_; }
  // Where there are more guests than `most` their slots are free again, and since[slot] becomes kNoKey of
  // sok_columns::since. False: there are not; on a device, where the host does not know, true.
  virtual bool release_guests(const sok_context& context, int64_t most, int32_t* since) = 0;
  // On CUDA: how many slots have been given out, on the device.
  virtual const int64_t* next_slot() const { return nullptr; }
  virtual void export_slots(const sok_context& context, int64_t first_slot, int64_t n, int64_t* keys, int64_t* slots,
                            int64_t* count) const = 0;

 protected:
  sok_hash_index(const sok_hash_index_config& config, int64_t max_guests,
                 int (*locate)(const sok_context*, int32_t, const sok_index_request*, uint32_t));

  int64_t* free_slots() const { return reinterpret_cast<int64_t*>(free_->data()); }
  sok_reserved_range_config range_config(int64_t bytes) const;

  std::unique_ptr<sok::ReservedRange> buckets_, keys_, free_, guests_;  // set by the backend's constructor
  sok::HashSegments segments_;

 private:
  const std::string name_;
  const sok_device device_;
  const int64_t capacity_, max_guests_;
  int64_t slot_limit_ = INT64_MAX;
  sok::Tiers* tiers_ = nullptr;
  const sok_index seam_;
};

namespace sok {

// How many keys locate is asked for, which must be fewer than 2^31. Throws Error.
int64_t check_number_of_keys(int32_t num_requests, const sok_index_request* requests);

// What locate is asked. Throws Error.
std::vector<HashRequest> hash_requests(int32_t num_requests, const sok_index_request* requests);

// max_guests: see HashRequest::allowed. Throws Error. A CUDA device is the current one, also when the index is
// destroyed.
std::unique_ptr<sok_hash_index> make_hash_index(const sok_hash_index_config& config, int64_t max_guests = 0);

// All but the device. Throws Error.
void check_hash_index_config(const sok_hash_index_config& config);

// One entry a request. Throws Error.
std::vector<HashRequest> check_hash_requests(const sok_context& context, int32_t num_requests,
                                             const sok_hash_index_request* requests);

}  // namespace sok

namespace sok::cpu {

std::unique_ptr<sok_hash_index> make_hash_index(const sok_hash_index_config& config, int64_t max_guests);

void hash_find(const sok_context& context, const std::vector<HashRequest>& requests);
void hash_find_or_insert(const sok_context& context, const std::vector<HashRequest>& requests);
void hash_erase(const sok_context& context, const std::vector<HashRequest>& requests);

}  // namespace sok::cpu

#ifdef SOK_WITH_CUDA
namespace sok::cuda {

std::unique_ptr<sok_hash_index> make_hash_index(const sok_hash_index_config& config, int64_t max_guests);

void hash_find(const sok_context& context, const std::vector<HashRequest>& requests);
void hash_find_or_insert(const sok_context& context, const std::vector<HashRequest>& requests);
void hash_erase(const sok_context& context, const std::vector<HashRequest>& requests);

}  // namespace sok::cuda
#endif

#endif  // SOK_TABLE_HASH_INDEX_H_
