# SPDX-License-Identifier: Apache-2.0
"""The C interface of core/include/sok in ctypes: enum numbers, structs and prototypes, name for name.

Struct fields, their order and these numbers are compared with the headers by tests/core/test_abi.py.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ubyte,
    c_uint32,
    c_uint64,
    c_void_p,
)

from sparse_operation_kit.core import _library

# types.h
INT32, INT64, UINT32, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, UINT8 = range(9)
CPU, CUDA = range(2)
# communicator.h
REDUCE_SUM, REDUCE_MEAN, REDUCE_MIN, REDUCE_MAX = range(4)
COMMUNICATOR_ID_SIZE = 136
# table.h
ANY_KEY = -1
# lookup.h
SUM, MEAN, SQRTN = range(3)
LOCATE_INSERT, LOCATE_ADMIT, LOCATE_FILTER, LOCATE_BESIDE = 1, 2, 4, 8
FOREVER = 2**63 - 1
EVICT_NOTHING, EVICT_LRU, EVICT_LFU, EVICT_EPOCH_LRU, EVICT_EPOCH_LFU, EVICT_CUSTOMIZED = range(6)
# gradient.h
GRADIENT_UNIQUE = 1
# initialize.h
CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL = range(4)
# optimizer.h
SGD, MOMENTUM, ADAGRAD, ROWWISE_ADAGRAD, ADAM, ADAMAX, ADADELTA, RMSPROP, FTRL = range(9)
NESTEROV = 1
EPSILON_INSIDE = 2
LEARNING_RATE_IN_MOMENTUM = 4
CENTERED = 8
DECOUPLED_WEIGHT_DECAY = 16
MAX_STATES = 3


class Device(ctypes.Structure):
    _fields_ = (("type", c_int32), ("index", c_int32))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * 2),
        ("row_stride", c_int64),
    )


ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t)
RELEASE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


class Allocator(ctypes.Structure):
    _fields_ = (("opaque", c_void_p), ("allocate", ALLOCATE), ("release", RELEASE))


BODY = ctypes.CFUNCTYPE(None, c_void_p, c_int32)
RUN = ctypes.CFUNCTYPE(None, c_void_p, c_int32, BODY, c_void_p)


class Executor(ctypes.Structure):
    _fields_ = (("opaque", c_void_p), ("num_workers", c_int32), ("reserved", c_int32), ("run", RUN))


class Context(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("device", Device),
        ("stream", c_void_p),
        ("allocator", Allocator),
        ("executor", Executor),
        ("flags", c_uint32),
        ("errors", c_void_p),
    )


class DeviceProperties(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("name", c_char * 256),
        ("total_memory", c_int64),
        ("compute_capability", c_int32),
        ("multiprocessors", c_int32),
    )


class NcclProperties(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", c_int32), ("reserved", c_int32), ("path", c_char * 1024))


class CommunicatorId(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * COMMUNICATOR_ID_SIZE),)


class ReservedRangeConfig(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("device", Device),
        ("bytes", c_int64),
        ("name", c_char_p),
        ("device_bytes", c_int64),
    )


class HashIndexConfig(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("device", Device),
        ("capacity", c_int64),
        ("initial_rows", c_int64),
        ("name", c_char_p),
    )


class HashIndexRequest(ctypes.Structure):
    _fields_ = (("index", c_void_p), ("keys", Tensor), ("slots", Tensor), ("is_new", Tensor))


class Placement(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("owner", c_int32),
        ("num_ranks", c_int32),
        ("rank", c_int32),
        ("num_rows", c_int64),
        ("dimension", c_int64),
    )


class Columns(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("weight", Tensor),
        ("since", Tensor),
        ("freed", c_int64),
        ("owner", c_void_p),
        ("index", c_void_p),
    )


class Index(ctypes.Structure):
    pass  # its function takes requests, which name it


class IndexRequest(ctypes.Structure):
    _fields_ = (("index", POINTER(Index)), ("keys", Tensor), ("slots", POINTER(c_int64)))


LOCATE = ctypes.CFUNCTYPE(c_int, POINTER(Context), c_int32, POINTER(IndexRequest), c_uint32)
Index._fields_ = (("struct_size", c_size_t), ("self", c_void_p), ("locate", LOCATE))


class Member(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("first_key", c_int64), ("num_rows", c_int64))


class Lookup(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("table", c_int32),
        ("combiner", c_int32),
        ("keys", Tensor),
        ("slots", Tensor),
        ("row_splits", Tensor),
        ("weights", Tensor),
        ("output", Tensor),
        ("generation", c_int64),
        ("num_members", c_int32),
        ("members", POINTER(Member)),
    )


class Routing(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("keys", Tensor),
        ("counts", Tensor),
        ("inverse", Tensor),
        ("order", Tensor),
        ("unique_splits", Tensor),
        ("bag_keys", Tensor),
        ("bag_splits", Tensor),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("pooled", POINTER(c_int32)),
        ("num_entries", c_int64),
        ("num_bag_keys", c_int64),
        ("num_bag_splits", c_int64),
    )


class Messages(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("num_ranks", c_int32),
        ("num_tables", c_int32),
        ("num_lookups", c_int32),
        ("num_parts", c_int32),
        ("dimensions", POINTER(c_int64)),
        ("lookup_tables", POINTER(c_int64)),
        ("counts", POINTER(c_int64)),
        ("row_stride", c_int64),
        ("num_keys", c_int64),
        ("num_bag_splits", c_int64),
        ("num_floats", c_int64),
    )


class Gradient(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("combiner", c_int32),
        ("flags", c_uint32),
        ("slots", Tensor),
        ("values", Tensor),
        ("row_splits", Tensor),
        ("weights", Tensor),
        ("generation", c_int64),
        ("num_members", c_int32),
    )


class Optimizer(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("flags", c_uint32),
        ("learning_rate", c_double),
        ("learning_rate_of_decay", c_double),
        ("weight_decay", c_double),
        ("momentum", c_double),
        ("beta1", c_double),
        ("beta2", c_double),
        ("rho", c_double),
        ("epsilon", c_double),
        ("l1", c_double),
        ("l2", c_double),
        ("l2_shrinkage", c_double),
        ("beta", c_double),
        ("learning_rate_power", c_double),
    )


class Update(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("table", POINTER(Columns)),
        ("optimizer", POINTER(Optimizer)),
        ("gradient_scale", c_double),
        ("num_states", c_int32),
        ("num_gradients", c_int32),
        ("states", Tensor * MAX_STATES),
        ("gradients", POINTER(Gradient)),
        ("stamps", Tensor),
        ("stamp", c_int64),
    )


AGREE = ctypes.CFUNCTYPE(c_int, c_void_p)


class Initializer(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("reserved", c_int32),
        ("seed", c_uint64),
        ("a", c_double),
        ("b", c_double),
    )


class Admission(ctypes.Structure):
    _fields_ = (("threshold", c_int64), ("max_candidates", c_int64), ("filter_ratio", c_double))


class DynamicTableConfig(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("index", HashIndexConfig),
        ("dimension", c_int64),
        ("dtype", c_int32),
        ("initializer", Initializer),
        ("eviction", c_int32),
        ("reserved", c_int32),
        ("half_life", c_int64),
        ("admission", Admission),
        ("time_to_live", c_double),
        ("device_rows", c_int64),
    )


class DynamicTableCounts(ctypes.Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("lookups", c_int64),
        ("insertions", c_int64),
        ("evictions", c_int64),
        ("refusals", c_int64),
        ("expirations", c_int64),
        ("device_hits", c_int64),
        ("host_hits", c_int64),
        ("moves", c_int64),
    )


class UseTime(ctypes.Structure):
    _fields_ = (("generation", c_int64), ("time", c_int64))


_CONTEXT = POINTER(Context)
_COUNTS = POINTER(c_int64)
_PLACEMENTS = (c_int32, POINTER(Placement))
_COLUMNS = (c_int32, POINTER(Columns))
_LOOKUPS = (c_int32, POINTER(Lookup))
_HASH_REQUESTS = (c_int32, POINTER(HashIndexRequest))

# name -> (result, parameters)
PROTOTYPES = {
    "sok_abi_version": (c_int, ()),
    "sok_version": (c_char_p, ()),
    "sok_build_info": (c_char_p, ()),
    "sok_last_error_message": (c_char_p, ()),
    "sok_status_name": (c_char_p, (c_int,)),
    "sok_built_with_cuda": (c_int, ()),
    "sok_cuda_device_count": (c_int, (POINTER(c_int32),)),
    "sok_device_get_properties": (c_int, (Device, POINTER(DeviceProperties))),
    "sok_device_get_uuid": (c_int, (Device, c_char_p)),
    "sok_batch_memory_create": (c_int, (Device, POINTER(c_void_p))),
    "sok_batch_memory_fill": (c_int, (c_void_p, c_void_p, c_int64, POINTER(c_void_p))),
    "sok_batch_memory_release": (c_int, (c_void_p, c_void_p, c_void_p)),
    "sok_batch_memory_destroy": (c_int, (c_void_p,)),
    "sok_nccl_get_properties": (c_int, (POINTER(NcclProperties),)),
    "sok_communicator_id_create": (c_int, (POINTER(CommunicatorId),)),
    "sok_communicator_create": (
        c_int,
        (Device, POINTER(CommunicatorId), c_int32, c_int32, c_double, POINTER(c_void_p)),
    ),
    "sok_communicator_num_ranks": (c_int32, (c_void_p,)),
    "sok_communicator_check": (c_int, (c_void_p,)),
    "sok_communicator_abort": (c_int, (c_void_p,)),
    "sok_communicator_destroy": (c_int, (c_void_p,)),
    "sok_all_to_all": (c_int, (_CONTEXT, c_void_p, Tensor, _COUNTS, Tensor, _COUNTS)),
    "sok_communicator_prepare_all_reduce": (c_int, (c_void_p,)),
    "sok_all_reduce": (c_int, (_CONTEXT, c_void_p, c_int32, c_int32, POINTER(Tensor), POINTER(Tensor))),
    "sok_share_errors": (c_int, (_CONTEXT, c_void_p, c_int32)),
    "sok_swap_counts": (c_int, (_CONTEXT, c_void_p, Tensor, _COUNTS, _COUNTS)),
    "sok_error_record_create": (c_int, (Device, POINTER(c_void_p))),
    "sok_error_record_destroy": (c_int, (c_void_p,)),
    "sok_error_record_check": (c_int, (c_void_p,)),
    "sok_error_record_is_empty": (c_int, (c_void_p,)),
    "sok_error_record_flag": (c_int, (_CONTEXT, Tensor)),
    "sok_thread_pool_create": (c_int, (c_int32, POINTER(c_void_p))),
    "sok_thread_pool_destroy": (c_int, (c_void_p,)),
    "sok_thread_pool_executor": (c_int, (c_void_p, POINTER(Executor))),
    "sok_reserved_range_create": (c_int, (POINTER(ReservedRangeConfig), POINTER(c_void_p))),
    "sok_reserved_range_destroy": (c_int, (c_void_p,)),
    "sok_reserved_range_data": (c_void_p, (c_void_p,)),
    "sok_reserved_range_reserved_bytes": (c_int64, (c_void_p,)),
    "sok_reserved_range_backed_bytes": (c_int64, (c_void_p,)),
    "sok_reserved_range_host_bytes": (c_int64, (c_void_p,)),
    "sok_reserved_range_grow": (c_int, (c_void_p, c_int64)),
    "sok_reserved_range_shrink": (c_int, (_CONTEXT, c_void_p, c_int64)),
    "sok_dynamic_table_create": (c_int, (POINTER(DynamicTableConfig), POINTER(c_void_p))),
    "sok_dynamic_table_destroy": (c_int, (c_void_p,)),
    "sok_dynamic_table_as_index": (POINTER(Index), (c_void_p,)),
    "sok_dynamic_table_hash_index": (c_void_p, (c_void_p,)),
    "sok_dynamic_table_generation": (c_int64, (c_void_p,)),
    "sok_dynamic_table_columns": (Columns, (c_void_p,)),
    "sok_dynamic_table_erase": (c_int, (_CONTEXT, c_void_p, Tensor, Tensor)),
    "sok_dynamic_table_prefetch": (c_int, (_CONTEXT, c_int32, POINTER(c_void_p), POINTER(Tensor))),
    "sok_dynamic_table_end_step": (c_int, (c_void_p,)),
    "sok_dynamic_table_set_epoch": (c_int, (c_void_p, c_int64)),
    "sok_dynamic_table_scores": (Tensor, (c_void_p,)),
    "sok_dynamic_table_candidates": (c_void_p, (c_void_p,)),
    "sok_dynamic_table_generation_before": (c_int64, (c_void_p, c_double)),
    "sok_dynamic_table_running_since": (c_int64, (c_void_p,)),
    "sok_dynamic_table_use_times": (c_int64, (c_void_p, c_int64, POINTER(UseTime))),
    "sok_dynamic_table_set_use_times": (c_int, (c_void_p, c_int64, POINTER(UseTime))),
    "sok_dynamic_table_shrink": (c_int, (_CONTEXT, c_void_p, POINTER(c_int64))),
    "sok_dynamic_table_set_scores": (c_int, (_CONTEXT, c_void_p, Tensor, Tensor)),
    "sok_dynamic_table_get_counts": (c_int, (c_void_p, POINTER(DynamicTableCounts))),
    "sok_dynamic_table_clear": (c_int, (_CONTEXT, c_void_p)),
    "sok_dynamic_table_add_column": (c_int, (_CONTEXT, c_void_p, c_int32, c_int64, c_double, POINTER(c_int32))),
    "sok_dynamic_table_column": (Tensor, (c_void_p, c_int32)),
    "sok_dynamic_table_bytes": (c_int64, (c_void_p,)),
    "sok_dynamic_table_host_bytes": (c_int64, (c_void_p,)),
    "sok_dynamic_table_read_and_evict": (c_int, (_CONTEXT, c_void_p, Tensor, Tensor, Tensor, Tensor, _COUNTS)),
    "sok_dynamic_table_read": (c_int, (_CONTEXT, c_void_p, Tensor, Tensor)),
    "sok_hash_index_create": (c_int, (POINTER(HashIndexConfig), POINTER(c_void_p))),
    "sok_hash_index_destroy": (c_int, (c_void_p,)),
    "sok_hash_index_as_index": (POINTER(Index), (c_void_p,)),
    "sok_hash_index_find": (c_int, (_CONTEXT, *_HASH_REQUESTS)),
    "sok_hash_index_find_or_insert": (c_int, (_CONTEXT, *_HASH_REQUESTS)),
    "sok_hash_index_erase": (c_int, (_CONTEXT, *_HASH_REQUESTS)),
    "sok_hash_index_reserve": (c_int, (_CONTEXT, c_void_p, c_int64)),
    "sok_hash_index_clear": (c_int, (_CONTEXT, c_void_p)),
    "sok_hash_index_size": (c_int, (_CONTEXT, c_void_p, POINTER(c_int64))),
    "sok_hash_index_export": (c_int, (_CONTEXT, c_void_p, c_int64, Tensor, Tensor, Tensor)),
    "sok_hash_index_capacity": (c_int64, (c_void_p,)),
    "sok_hash_index_num_slots": (c_int64, (c_void_p,)),
    "sok_hash_index_bytes": (c_int64, (c_void_p,)),
    "sok_placement_local_rows": (c_int64, (c_int64, c_int32, c_int32, c_int32)),
    "sok_assign": (c_int, (_CONTEXT, POINTER(Columns), Tensor, Tensor, Tensor)),
    "sok_bags_from_coordinates": (c_int, (_CONTEXT, Tensor, c_int64, Tensor, Tensor, Tensor)),
    "sok_split_batch": (c_int, (_CONTEXT, *_PLACEMENTS, *_LOOKUPS, POINTER(Batch))),
    "sok_route": (c_int, (_CONTEXT, *_PLACEMENTS, *_LOOKUPS, POINTER(c_int32), POINTER(Routing))),
    "sok_locate": (c_int, (_CONTEXT, *_PLACEMENTS, POINTER(POINTER(Index)), *_LOOKUPS, c_uint32)),
    "sok_combine": (c_int, (_CONTEXT, *_PLACEMENTS, *_LOOKUPS, POINTER(Messages), Tensor, Tensor)),
    "sok_gather_combine": (c_int, (_CONTEXT, *_COLUMNS, *_LOOKUPS)),
    "sok_messages_read": (c_int, (POINTER(Messages), _COUNTS, _COUNTS)),
    "sok_join_keys": (c_int, (_CONTEXT, POINTER(Messages), POINTER(Routing), Tensor)),
    "sok_owner_lookups": (c_int, (POINTER(Messages), Tensor, Tensor, Tensor, POINTER(Lookup))),
    "sok_owner_gradients": (c_int, (POINTER(Messages), Tensor, Tensor, Tensor, POINTER(Gradient), _COUNTS)),
    "sok_spread": (
        c_int,
        (_CONTEXT, *_PLACEMENTS, *_LOOKUPS, POINTER(Tensor), POINTER(Messages), POINTER(Routing), Tensor),
    ),
    "sok_weight_gradient": (c_int, (_CONTEXT, *_COLUMNS, *_LOOKUPS, POINTER(Tensor), POINTER(Tensor))),
    "sok_weight_gradient_of_rows": (
        c_int,
        (_CONTEXT, *_PLACEMENTS, *_LOOKUPS, POINTER(Tensor), POINTER(Messages), Tensor, Tensor, POINTER(Tensor)),
    ),
    "sok_reduce": (c_int, (_CONTEXT, POINTER(Columns), c_int32, POINTER(Gradient), Tensor, Tensor, Tensor)),
    "sok_apply": (c_int, (_CONTEXT, c_int32, POINTER(Update), AGREE, c_void_p)),
    "sok_initialize": (c_int, (_CONTEXT, POINTER(Initializer), Tensor, c_int64, c_int64, Tensor)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded core with the prototype of every function set."""
    loaded = _library.load()
    for name, (result, parameters) in PROTOTYPES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = parameters
    return loaded
