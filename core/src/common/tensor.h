// SPDX-License-Identifier: Apache-2.0
// Checks of sok_tensor views.
#ifndef SOK_COMMON_TENSOR_H_
#define SOK_COMMON_TENSOR_H_

#include <cstdint>
#include <initializer_list>
#include <ostream>

#include "common/call.h"
#include "sok/types.h"

namespace sok {

// What an argument is called in messages: "table 'user_id': lookups[2].keys". Costs nothing until it is printed.
struct Label {
  const char* argument;  // "keys", or the array "lookups" when `field` is set
  int64_t index = -1;
  const char* field = nullptr;
  const char* table = nullptr;
};

inline std::ostream& operator<<(std::ostream& stream, const Label& label) {
  if (label.table != nullptr) stream << "table '" << label.table << "': ";
  stream << label.argument;
  if (label.index >= 0) stream << '[' << label.index << ']';
  if (label.field != nullptr) stream << '.' << label.field;
  return stream;
}

const char* dtype_name(int32_t dtype);
int64_t dtype_size(int32_t dtype);  // bytes; 8 for a number that is no dtype

inline bool is_absent(const sok_tensor& tensor) { return tensor.data == nullptr && tensor.rank == 0; }

constexpr int64_t kAnySize = -1;

// A present, contiguous view: dtype, rank, sizes (kAnySize: any), a size in bytes that fits, a pointer that is set and
// aligned.
// Without `contents` the pointer is not looked at.
void check_tensor(const sok_tensor& tensor, const Label& what, std::initializer_list<int32_t> dtypes,
                  std::initializer_list<int64_t> shape, bool contents = true);

template <typename T>
T* checked_data(const sok_tensor& tensor, const Label& what, int32_t dtype, std::initializer_list<int64_t> shape) {
  check_tensor(tensor, what, {dtype}, shape);
  return static_cast<T*>(tensor.data);
}

// [rows, columns] SOK_FLOAT32; row_stride may be set. With members, by which rows can be divided, [rows / members,
// members * columns].
Vectors check_vectors(const sok_tensor& tensor, const Label& what, int64_t rows, int64_t columns, int32_t members);

// float32, float16 or bfloat16.
Floats check_floats(const sok_tensor& tensor, const Label& what, std::initializer_list<int64_t> shape);

Integers check_integers(const sok_tensor& tensor, const Label& what, int64_t size, bool contents = true);

}  // namespace sok

#endif  // SOK_COMMON_TENSOR_H_
