// SPDX-License-Identifier: Apache-2.0
// The kernels behind the schemas of library.cc, where their arguments are described. They serve CPU and CUDA tensors
// alike: the core's context says which device does the work.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace sok_torch {

using Names = c10::List<std::string>;
using OptionalTensors = c10::List<std::optional<at::Tensor>>;

std::vector<at::Tensor> gather_combine(at::TensorList tables, const Names& names, at::TensorList keys,
                                       at::IntArrayRef key_tables, at::IntArrayRef combiners,
                                       std::optional<at::TensorList> row_splits, std::optional<at::IntArrayRef> bagged,
                                       std::optional<at::TensorList> weights, std::optional<at::IntArrayRef> weighted,
                                       bool concat, std::optional<at::IntArrayRef> members,
                                       std::optional<at::IntArrayRef> by_key);

std::vector<at::Tensor> weight_gradient(const OptionalTensors& output_gradients, at::TensorList tables,
                                        const Names& names, at::TensorList keys, at::IntArrayRef key_tables,
                                        at::IntArrayRef combiners, at::TensorList row_splits, at::IntArrayRef bagged,
                                        at::TensorList weights, at::IntArrayRef weighted, at::IntArrayRef generations,
                                        at::IntArrayRef members);

at::Tensor locate_members_of(const at::Tensor& keys, const std::optional<at::Tensor>& row_splits, std::string stack,
                             int64_t num_rows, const Names& names, at::IntArrayRef first_keys, at::IntArrayRef rows);

std::tuple<at::Tensor, at::Tensor, at::Tensor> bags(const at::Tensor& rows, int64_t num_bags);

void initialize(at::Tensor rows, int64_t kind, int64_t seed, double a, double b, const std::optional<at::Tensor>& keys,
                int64_t first_key, int64_t key_stride);

void assign(at::Tensor target, std::string name, int64_t owner, int64_t num_rows, int64_t num_ranks, int64_t rank,
            const at::Tensor& keys, const at::Tensor& values);

at::Tensor error_flags(const at::Tensor& counts);

void check_errors(int64_t device);

std::optional<double> common_number(at::TensorList numbers);

void count_up(at::TensorList numbers);

// Whether pairs (keys, row_splits) can be used as they are: 1-D on `device`, keys int32 or int64, row_splits int64, and
// not empty.
bool plain_pairs(at::TensorList keys, at::TensorList row_splits, at::Device device);

std::vector<int64_t> error_devices();

void all_to_all(at::Tensor received, const at::Tensor& send, int64_t communicator, at::IntArrayRef send_counts,
                at::IntArrayRef receive_counts);

at::Tensor swap_counts(const at::Tensor& counts, int64_t communicator);

void share_errors(int64_t communicator, at::Device device, bool failed);

std::vector<int64_t> failed_ranks(const at::Tensor& received);

void check_status(int64_t status);

}  // namespace sok_torch
