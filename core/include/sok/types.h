/* SPDX-License-Identifier: Apache-2.0 */
/* Plain data that crosses the boundary: dtypes, devices and views of tensors. */
#ifndef SOK_TYPES_H_
#define SOK_TYPES_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Numbers 0 to 6 are those of the checkpoint format (docs/FORMAT.md); they never change. */
typedef enum sok_dtype {
  SOK_INT32 = 0,
  SOK_INT64 = 1,
  SOK_UINT32 = 2,
  SOK_UINT64 = 3,
  SOK_FLOAT16 = 4,
  SOK_FLOAT32 = 5,
  SOK_FLOAT64 = 6,
  SOK_BFLOAT16 = 7,
  SOK_UINT8 = 8 /* also stands for what else has one byte, where the meaning does not matter */
} sok_dtype;

typedef enum sok_device_type { SOK_CPU = 0, SOK_CUDA = 1 } sok_device_type;

typedef struct sok_device {
  int32_t type;  /* sok_device_type */
  int32_t index; /* CUDA ordinal; 0 for the CPU */
} sok_device;

/* A view of a dense, C-contiguous array. The caller owns the memory, which lies on the device of the call's context
 * unless the parameter says "host". `data` may be NULL when the number of elements is 0; where a parameter is optional,
 * a view with data == NULL and rank == 0 means that it is absent (SOK_NO_TENSOR).
 *
 * Pooled vectors and their gradients may be columns of a wider array: `output` of sok_lookup, `values` of sok_gradient
 * and output gradients take a row_stride. */
typedef struct sok_tensor {
  void* data;
  int32_t dtype;      /* sok_dtype */
  int32_t rank;       /* 0, 1 or 2 */
  int64_t shape[2];   /* elements; entries past rank are ignored */
  int64_t row_stride; /* elements from a row to the next, >= shape[1], where rank is 2; 0: shape[1] */
} sok_tensor;

#define SOK_NO_TENSOR {NULL, SOK_INT64, 0, {0, 0}, 0}

#ifdef __cplusplus
}
#endif
#endif /* SOK_TYPES_H_ */
