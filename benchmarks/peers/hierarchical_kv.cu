// SPDX-License-Identifier: Apache-2.0
// Peer of benchmarks/hash_index.py: NVIDIA's HierarchicalKV, rows of float32 in device memory, LRU, its own defaults.
//
//   OPTIONS="-O3 -std=c++17 -arch=sm_90 -cudart static --expt-relaxed-constexpr"
//   nvcc $OPTIONS -I HIERARCHICAL_KV/include -o hierarchical_kv hierarchical_kv.cu
//   ./hierarchical_kv ROWS DIMENSION KEYS HELD REPEAT SEED LOAD...
//
// Operations on KEYS distinct keys, of which a share HELD are drawn at random among all that the table holds and the
// others are new; other keys each time. Milliseconds are medians of REPEAT calls, by events around a call that waits in
// the stream's queue. Where a call inserts into a table that is not full its new keys are erased afterwards. It prints
// one JSON object.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "merlin_hashtable.cuh"

namespace {

using Key = uint64_t;
using Table = nv::merlin::HashTable<Key, float, uint64_t, nv::merlin::EvictStrategy::kLru>;

constexpr int kWarmUps = 2;
constexpr double kNearlyFull = 0.999;  // of the table's capacity: it evicts long before it is full
constexpr size_t kMostFilling = 64;    // times the capacity, before a load is given up
constexpr Key kNewNumbers = Key{1} << 50;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

// A bijection of the numbers 0, 1, ... to keys that look random.
__host__ __device__ Key key_of(Key number) { return number * 0x9E3779B97F4A7C15u; }

__global__ void keys_from(Key first, size_t n, Key* keys) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < n; i += size_t{gridDim.x} * blockDim.x) {
    keys[i] = key_of(first + i);
  }
}

__global__ void wait_a_while() {
  for (int i = 0; i < 2000; ++i) __nanosleep(1000);
}

template <typename T>
T* device_array(size_t n) {
  T* array = nullptr;
  check(cudaMalloc(&array, n * sizeof(T)));
  return array;
}

class Benchmark {
 public:
  Benchmark(size_t rows, size_t dimension, size_t n, double held, uint64_t seed)
      : rows_(rows), n_(n), held_(static_cast<size_t>(held * static_cast<double>(n))), random_(seed) {
    nv::merlin::HashTableOptions options;
    options.init_capacity = options.max_capacity = rows;
    options.max_hbm_for_vectors = rows * dimension * sizeof(float);
    options.dim = dimension;
    options.api_lock = false;
    table_.init(options);
    check(cudaStreamCreate(&stream_));
    keys_ = device_array<Key>(2 * n);
    found_ = device_array<bool>(2 * n);
    values_ = device_array<float>(n * dimension);
    pointers_ = device_array<float*>(n);
  }

  // Inserts keys until the table is so full; false where it does not become so.
  bool fill(double load) {
    const double wanted = std::min(load, kNearlyFull);
    while (table_.load_factor(stream_) < wanted) {
      const double missing = (wanted - table_.load_factor(stream_)) * static_cast<double>(rows_);
      const size_t count = std::clamp<size_t>(static_cast<size_t>(missing), 1, n_);
      keys_from<<<1024, 256, 0, stream_>>>(inserted_, count, keys_);
      table_.find_or_insert(count, keys_, pointers_, found_, nullptr, stream_);
      check(cudaStreamSynchronize(stream_));
      inserted_ += count;
      if (inserted_ > kMostFilling * rows_) return false;
    }
    return true;
  }

  double load() { return table_.load_factor(stream_); }

  // Seconds of a call, a median.
  double time(int repeat, bool inserts, bool has_room, const std::function<void()>& call) {
    std::vector<float> times;
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    for (int i = 0; i < repeat + kWarmUps; ++i) {
      draw();
      wait_a_while<<<1, 1, 0, stream_>>>();
      check(cudaEventRecord(begin, stream_));
      call();
      check(cudaEventRecord(end, stream_));
      check(cudaStreamSynchronize(stream_));
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin, end));
      if (i >= kWarmUps) times.push_back(milliseconds);
      if (inserts && has_room) erase_new();
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2] * 1e-3;
  }

  void find_pointers() { table_.find(n_, keys_, pointers_, found_, nullptr, stream_); }
  void find_rows() { table_.find(n_, keys_, values_, found_, nullptr, stream_); }
  void find_or_insert_pointers() { table_.find_or_insert(n_, keys_, pointers_, found_, nullptr, stream_); }
  void find_or_insert_rows() { table_.find_or_insert(n_, keys_, values_, nullptr, stream_); }

 private:
  // Puts new keys and some that the table holds into keys_, in random order.
  void draw() {
    std::vector<Key> drawn;
    // Of those that were ever inserted some are gone: more are drawn, and those that are there are taken.
    while (drawn.size() < held_) {
      std::vector<Key> tried(2 * n_);
      for (Key& key : tried) key = key_of(random_() % inserted_);
      check(cudaMemcpy(keys_, tried.data(), tried.size() * sizeof(Key), cudaMemcpyHostToDevice));
      table_.contains(tried.size(), keys_, found_, stream_);
      std::vector<char> found(tried.size());
      check(cudaStreamSynchronize(stream_));
      check(cudaMemcpy(found.data(), found_, found.size(), cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < tried.size(); ++i) {
        if (found[i]) drawn.push_back(tried[i]);
      }
      std::sort(drawn.begin(), drawn.end());
      drawn.erase(std::unique(drawn.begin(), drawn.end()), drawn.end());
      std::shuffle(drawn.begin(), drawn.end(), random_);
    }
    drawn.resize(held_);
    first_new_ = kNewNumbers + (random_() >> 24);
    for (size_t i = held_; i < n_; ++i) drawn.push_back(key_of(first_new_ + i));
    std::shuffle(drawn.begin(), drawn.end(), random_);
    check(cudaMemcpy(keys_, drawn.data(), n_ * sizeof(Key), cudaMemcpyHostToDevice));
  }

  void erase_new() {
    keys_from<<<1024, 256, 0, stream_>>>(first_new_ + held_, n_ - held_, keys_);
    table_.erase(n_ - held_, keys_, stream_);
    check(cudaStreamSynchronize(stream_));
  }

  size_t rows_, n_, held_;
  std::mt19937_64 random_;
  Table table_;
  cudaStream_t stream_ = nullptr;
  Key inserted_ = 0;   // the numbers below it were inserted
  Key first_new_ = 0;  // with held_ added: the first number of the keys that are new
  Key* keys_ = nullptr;
  bool* found_ = nullptr;
  float* values_ = nullptr;
  float** pointers_ = nullptr;
};

}  // namespace

int main(int count, char** arguments) {
  if (count < 8) {
    std::fprintf(stderr, "usage: %s ROWS DIMENSION KEYS HELD REPEAT SEED LOAD...\n", arguments[0]);
    return 2;
  }
  const size_t rows = std::strtoull(arguments[1], nullptr, 10), dimension = std::strtoull(arguments[2], nullptr, 10);
  const size_t n = std::strtoull(arguments[3], nullptr, 10);
  const int repeat = std::atoi(arguments[5]);
  Benchmark benchmark(rows, dimension, n, std::atof(arguments[4]), std::strtoull(arguments[6], nullptr, 10));
  struct Operation {
    const char* name;
    bool inserts;
    void (Benchmark::*call)();
  };
  const Operation operations[] = {
      {"find", false, &Benchmark::find_pointers},
      {"find, rows", false, &Benchmark::find_rows},
      {"find_or_insert", true, &Benchmark::find_or_insert_pointers},
      {"find_or_insert, rows", true, &Benchmark::find_or_insert_rows},
  };
  std::string reports;
  for (int i = 7; i < count; ++i) {
    const double load = std::atof(arguments[i]);
    if (!benchmark.fill(load)) {
      std::fprintf(stderr, "load %g is not reached\n", load);
      continue;
    }
    for (const Operation& operation : operations) {
      const double at = benchmark.load();
      const double seconds =
          benchmark.time(repeat, operation.inserts, load < kNearlyFull, [&] { (benchmark.*operation.call)(); });
      char text[256];
      std::snprintf(text, sizeof text,
                    "%s{\"operation\": \"%s\", \"load\": %g, \"real_load\": %.4f, \"keys_per_second\": %.6g}",
                    reports.empty() ? "" : ", ", operation.name, load, at, static_cast<double>(n) / seconds);
      reports += text;
    }
  }
  std::printf("{\"peer\": \"HierarchicalKV\", \"reports\": [%s]}\n", reports.c_str());
  return 0;
}
