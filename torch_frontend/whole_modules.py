# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does to all parameters of a module, where tables are among them.

Its functions are wrapped when this package is imported, each once. Shards differ from rank to rank: neither they nor
their gradients may be broadcast, averaged or sharded again, and what takes a table's place has to be a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sparse_operation_kit.torch.table_parameter import is_table


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts `make` of a function in its place, once."""
    original = getattr(owner, name, None)
    if original is None or getattr(original, "_sok_knows_tables", False):
        return
    wrapper: Any = functools.wraps(original)(make(original))
    wrapper._sok_knows_tables = True
    setattr(owner, name, wrapper)


def _apply_keeps_tables(apply: Any) -> Any:
    """Module._apply, by which to_empty() and the like make new parameters where memory cannot be replaced."""

    def with_tables(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before: dict[str, Any] = {name: value for name, value in self._parameters.items() if is_table(value)}
        result = apply(self, *args, **kwargs)
        for name, table in before.items():
            value: Any = self._parameters[name]
            if not is_table(value):
                self._parameters[name] = table.with_rows(value.detach())
        return result

    return with_tables


def _ddp_ignores_tables(constructor: Any) -> Any:
    """DistributedDataParallel skips the parameters that a module names in ``_ddp_params_and_buffers_to_ignore``; before
    its constructor looks there, the tables of the module are added.
    """

    def with_tables(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        names = {name for name, value in module.named_parameters(remove_duplicate=False) if is_table(value)}
        if names:
            # Its own reducer spells the parameters of the outermost module with a dot in front.
            names |= {f".{name}" for name in names if "." not in name}
            names |= set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            module._ddp_params_and_buffers_to_ignore = sorted(names)  # type: ignore[assignment]
        constructor(self, module, *args, **kwargs)

    return with_tables


def _fsdp_ignores_tables(managed_states: Any) -> Any:
    """fully_shard asks this for the parameters that it is to manage, less its `ignored_params`."""

    def with_tables(*args: Any, **kwargs: Any) -> Any:
        parameters, buffers = managed_states(*args, **kwargs)
        return [parameter for parameter in parameters if not is_table(parameter)], buffers

    return with_tables


wrap(torch.nn.Module, "_apply", _apply_keeps_tables)
if torch.distributed.is_available():
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from torch.nn.parallel import DistributedDataParallel

    wrap(DistributedDataParallel, "__init__", _ddp_ignores_tables)
    wrap(_fsdp_init, "_get_managed_states", _fsdp_ignores_tables)
