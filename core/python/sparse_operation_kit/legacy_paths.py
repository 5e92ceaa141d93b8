# SPDX-License-Identifier: Apache-2.0
"""The module paths of SparseOperationKit 1.x, where its scripts find what `sparse_operation_kit.tensorflow.legacy` has.

There are no files behind them: importing `sparse_operation_kit` makes them importable, and TensorFlow is loaded when
one of their names is asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

_ROOT = __package__
_LEGACY = f"{_ROOT}.tensorflow.legacy"

PATHS: Mapping[str, Mapping[str, str]] = {
    "core.context_scope": {"OptimizerScope": "scope.OptimizerScope"},
    "core.initialize": {"Init": "initialize.Init"},
    "embeddings": {},
    "embeddings.all2all_dense_embedding": {"All2AllDenseEmbedding": "layers.All2AllDenseEmbedding"},
    "embeddings.distributed_embedding": {"DistributedEmbedding": "layers.DistributedEmbedding"},
    "embeddings.get_embedding_op": {"get_embedding": "layers.get_embedding"},
    "embeddings.tf_distributed_embedding": {"TFDistributedEmbedding": "layers.TFDistributedEmbedding"},
    "experiment": {},  # the names of SparseOperationKit 2.x
    "kit_lib": {"in_tensorflow2": "keys.in_tensorflow2"},
    "optimizers": {
        "Adam": "optimizers.PluginAdam",
        "split_embedding_variable_from_others": "optimizers.split_embedding_variable_from_others",
    },
    "optimizers.adam": {"Adam": "optimizers.PluginAdam"},
    "optimizers.utils": {
        "split_embedding_variable_from_others": "optimizers.split_embedding_variable_from_others",
    },
    "saver": {},
    "saver.Saver": {"Saver": "saver.Saver"},
    "tf": {"unique": "optimizers.unique", "unsorted_segment_sum": "optimizers.unsorted_segment_sum"},
    "tf.keras": {},
    "tf.keras.mixed_precision": {"LossScaleOptimizer": "optimizers.LossScaleOptimizer"},
    "tf.keras.optimizers": {"Adam": "optimizers.Adam", "LazyAdamOptimizer": "optimizers.LazyAdamOptimizer"},
    "tf.keras.optimizers.adam": {"Adam": "optimizers.Adam"},
    "tf.keras.optimizers.lazy_adam": {"LazyAdamOptimizer": "optimizers.LazyAdamOptimizer"},
}
"""Below `sparse_operation_kit`: a module's path -> its names -> where each is in `legacy`.

`optimizers` is a module of this version, which has these names besides its own.
"""


def look_up(path: str, name: str) -> Any:
    """The name of a module in PATHS: a class or function of `legacy`, or a module below it. AttributeError without."""
    if name in PATHS[path]:
        module, _, attribute = PATHS[path][name].partition(".")
        return getattr(importlib.import_module(f"{_LEGACY}.{module}"), attribute)
    if f"{path}.{name}" in PATHS:
        return importlib.import_module(f"{_ROOT}.{path}.{name}")
    if path == "experiment" and not name.startswith("_"):
        return getattr(importlib.import_module(f"{_ROOT}.tensorflow"), name)
    raise AttributeError(f"module '{_ROOT}.{path}' has no attribute {name!r}")


class _Module(types.ModuleType):
    """A module of PATHS."""

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__.removeprefix(f"{_ROOT}."), name)

    def __dir__(self) -> list[str]:
        path = self.__name__.removeprefix(f"{_ROOT}.")
        below = [other.removeprefix(f"{path}.") for other in PATHS if other.startswith(f"{path}.")]
        return sorted({*super().__dir__(), *PATHS[path], *(name for name in below if "." not in name)})


class _Initialize(_Module):
    """`core.initialize`, which is a function of this version too."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from sparse_operation_kit.core.initializer import initialize

        return initialize(*args, **options)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix(f"{_ROOT}.")
        if name == fullname or name not in PATHS:
            return None
        package = any(other.startswith(f"{name}.") for other in PATHS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        of = _Initialize if spec.name == f"{_ROOT}.core.initialize" else _Module
        return of(spec.name, f"A path of SparseOperationKit 1.x; see {__name__}.")

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Makes the paths importable, after all that is found otherwise."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
