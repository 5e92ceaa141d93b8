// SPDX-License-Identifier: Apache-2.0
#include "common/tensor.h"

#include <algorithm>
#include <string>

#include "common/status.h"

namespace sok {

int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case SOK_UINT8:
      return 1;
    case SOK_FLOAT16:
    case SOK_BFLOAT16:
      return 2;
    case SOK_INT32:
    case SOK_UINT32:
    case SOK_FLOAT32:
      return 4;
    default:
      return 8;
  }
}

namespace {

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (const int64_t* size = shape.begin(); size != shape.end(); ++size) {
    if (size != shape.begin()) text += ", ";
    text += *size == kAnySize ? "any" : std::to_string(*size);
  }
  return text + "]";
}

std::string shape_text(const sok_tensor& tensor) {
  return tensor.rank == 0   ? shape_text({})
         : tensor.rank == 1 ? shape_text({tensor.shape[0]})
                            : shape_text({tensor.shape[0], tensor.shape[1]});
}

}  // namespace

const char* dtype_name(int32_t dtype) {
  static constexpr const char* kNames[] = {"int32",   "int64",   "uint32",   "uint64", "float16",
                                           "float32", "float64", "bfloat16", "uint8"};
  return dtype >= 0 && dtype < 9 ? kNames[dtype] : "unknown dtype";
}

void check_tensor(const sok_tensor& tensor, const Label& what, std::initializer_list<int32_t> dtypes,
                  std::initializer_list<int64_t> shape, bool contents) {
  SOK_CHECK(!is_absent(tensor), what, " is missing");
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) {
    std::string wanted;
    for (const int32_t dtype : dtypes) wanted += (wanted.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    fail(SOK_INVALID_ARGUMENT, what, " is ", dtype_name(tensor.dtype), ", must be ", wanted);
  }
  SOK_CHECK(tensor.rank == static_cast<int32_t>(shape.size()), what, " has rank ", tensor.rank, ", must have rank ",
            shape.size());
  int64_t elements = 1;
  for (int32_t i = 0; i < tensor.rank; ++i) {
    const int64_t wanted = shape.begin()[i];
    SOK_CHECK(tensor.shape[i] >= 0 && (wanted == kAnySize || wanted == tensor.shape[i]), what, " has shape ",
              shape_text(tensor), ", must have ", shape_text(shape));
    SOK_CHECK(!__builtin_mul_overflow(elements, tensor.shape[i], &elements), what, " of shape ", shape_text(tensor),
              " does not fit the address space");
  }
  SOK_CHECK(tensor.row_stride == 0 || (tensor.rank == 2 && tensor.row_stride == tensor.shape[1]), what,
            ".row_stride is ", tensor.row_stride, ", but this array must be contiguous");
  const int64_t item = dtype_size(tensor.dtype);
  SOK_CHECK(elements <= INT64_MAX / 16 / item, what, " of shape ", shape_text(tensor),
            " does not fit the address space");
  if (!contents || elements == 0) return;
  SOK_CHECK(tensor.data != nullptr, what, " has elements but no data");
  SOK_CHECK(reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(item) == 0, what,
            " is not aligned to its elements");
}

Vectors check_vectors(const sok_tensor& tensor, const Label& what, int64_t rows, int64_t columns, int32_t members) {
  sok_tensor contiguous = tensor;
  contiguous.row_stride = 0;
  const int64_t batch = members == 0 ? rows : rows / members;
  check_tensor(contiguous, what, {SOK_FLOAT32}, {batch, members == 0 ? columns : members * columns});
  const int64_t stride = tensor.row_stride == 0 ? tensor.shape[1] : tensor.row_stride;
  SOK_CHECK(stride >= tensor.shape[1] && stride <= INT32_MAX, what, ".row_stride is ", tensor.row_stride,
            ", must be 0 or in [", tensor.shape[1], ", 2^31)");
  SOK_CHECK(stride == 0 || tensor.shape[0] <= INT64_MAX / 64 / stride, what, " of ", tensor.shape[0], " rows, ", stride,
            " elements apart, does not fit the address space");
  return {static_cast<float*>(tensor.data), stride, members <= 1 ? 0 : batch, columns};  // one member is as a table
}

Floats check_floats(const sok_tensor& tensor, const Label& what, std::initializer_list<int64_t> shape) {
  check_tensor(tensor, what, {SOK_FLOAT32, SOK_FLOAT16, SOK_BFLOAT16}, shape);
  return {tensor.data, static_cast<sok_dtype>(tensor.dtype)};
}

Integers check_integers(const sok_tensor& tensor, const Label& what, int64_t size, bool contents) {
  check_tensor(tensor, what, {SOK_INT32, SOK_INT64}, {size}, contents);
  return {tensor.data, tensor.shape[0], tensor.dtype == SOK_INT64};
}

}  // namespace sok
