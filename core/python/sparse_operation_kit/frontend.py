# SPDX-License-Identifier: Apache-2.0
"""The functions that run between steps, which are the same for every framework: dump, load, and changed rows.

A frontend derives from `Frontend` and says what framework.py wants to know; its own modules give the methods their
public names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from . import dynamic, incremental
from .checkpoint import serving
from .checkpoint.background import PendingDump
from .checkpoint.dumping import dump_variables, dump_variables_async, source_of
from .checkpoint.group import Group, agree
from .checkpoint.reader import Dump, has_dump
from .checkpoint.scratch import folder_of
from .checkpoint.source import Source
from .checkpoint.variables import describe_together, gather, load_variables
from .expiry import Expiry, Predicate
from .framework import Framework, Held
from .held import Array, HeldTable, gives_up_keys
from .increment_series import Increments
from .stored_rows import alone


class Frontend(Framework[Held]):
    """The functions over a framework's tables."""

    def dump(
        self,
        path: str | os.PathLike[str],
        vars: Any,
        optimizer: Any = None,
        *,
        step: int | None = None,
        extra: Any = None,
        progress: bool | None = None,
    ) -> None:
        """Writes tables, and with an optimizer their states and its step counts, to the directory `path`.

        Called by every rank with the same tables; each writes its rows. The dump appears whole or not at all, in place
        of one that was there. Any number of ranks loads it, in either frontend.

        Args:
          path: a directory that all ranks see.
          vars: tables, or one; a stack stands for its members, a layer of dist_model_parallel for its tables, and so
            does each of them. Dense variables are not for this; see `filter_variables`.
          optimizer: the `OptimizerWrapper` (`DistributedOptimizer`, `SGD`, ...) that updates them, or what it wraps; in
            TensorFlow also a legacy one of tf_keras that updates static tables itself. A list has one for each table,
            all of one class. Hyper-parameters are written too, for the record.
          step, extra: an integer and plain JSON data of the caller's, which load gives back.
          progress: whether to show a bar; None: on rank 0 of a terminal.

        Raises, on all ranks when on one:
          RuntimeError: before init(), inside a tf.function, or in a tf.compat.v1 graph without a default session.
          TypeError: something that is no table, or an optimizer that has no states of tables.
          ValueError: in PyTorch, a table that is not the optimizer's.
          NotImplementedError: an optimizer that cannot update tables.
          Otherwise what sparse_operation_kit.checkpoint raises (ValueError and OSError); the older dump is then intact.
        """
        self.check_between_steps("dump")
        dump_variables(
            path,
            lambda: self.describe(vars, optimizer),
            group=self.group(),
            frontend=self.version,
            step=step,
            extra=extra,
            progress=progress,
        )

    def dump_async(
        self,
        path: str | os.PathLike[str],
        vars: Any,
        optimizer: Any = None,
        *,
        step: int | None = None,
        extra: Any = None,
        progress: bool | None = None,
    ) -> PendingDump:
        """`dump` of the tables as they are now, while training goes on: a thread writes copies of them.

            pending = sok.dump_async(path, tables, optimizer, step=step)
            ... steps ...
            pending.wait()

        Called by every rank with the same tables, between steps. It returns when this rank's rows, their states and
        all else that a dump has are copied to the host's memory: as many bytes as this rank's part of the files,
        which it gives back table by table as they are written. The files are those of `dump` at the time of the call.

        `wait()` of the result puts the dump in place, and only then what was at `path` goes; every rank calls it, in
        the same order as other collective calls, between steps. `done()` says whether this rank's rows are written.
        A dump that nobody waits for is given up, with a RuntimeWarning, when the result goes or the process ends.

        Args:
          path, vars, optimizer, step, extra: as of `dump`. No other dump goes to `path` before `wait`.
          progress: as of `dump`: a bar for the copies, and one while `wait` waits. The thread shows nothing.

        Raises, on all ranks when on one: what `dump` does, what has to do with writing rows by `wait`, after which it
        begins anew; also
          RuntimeError: a dump to `path` was begun, and nobody has waited for it.
          NotImplementedError: a table with a store: memory need not have room for its rows.
        """
        self.check_between_steps("dump_async")
        return dump_variables_async(
            path,
            lambda: self.describe(vars, optimizer),
            group=self.group(),
            frontend=self.version,
            step=step,
            extra=extra,
            progress=progress,
            check=self.check_between_steps,
        )

    def has_dump(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is a dump at `path`, so that a job knows whether it starts or goes on. Called by every rank.

        The answer is the same on all ranks: whether any of them sees one. What an interrupted dump left of an older
        one counts, which `os.path.isdir` would not find. A dump may be damaged: `load` says so.

        Raises, on all ranks when on one:
          RuntimeError: before init(), or inside a tf.function.
          StorageError: the system refuses to say.
        """
        self.check_between_steps("has_dump")
        return any(agree(self.group(), lambda: has_dump(path)))

    def load(
        self,
        path: str | os.PathLike[str],
        vars: Any,
        optimizer: Any = None,
        *,
        verify: str = "before",
        progress: bool | None = None,
    ) -> Dump:
        """Loads tables, and with an optimizer their states and its step counts, from a dump of any number of ranks.

        Called by every rank with the same tables; each reads its rows. A dump of either frontend, or of
        SparseOperationKit 2.x. Tables of float16 and bfloat16 load what float32 ones dumped, rounded to nearest, and
        the reverse, exactly. The optimizer must be of the dump's kind (Adam and AdamW count as one); its
        hyper-parameters stay as they are, its step counts become the dump's, so that bias corrections and schedules of
        Keras go on. Momentum becomes that of the framework that loads: Keras's holds the learning rate, PyTorch's does
        not. States of dense variables are not the dump's, nor are PyTorch's schedulers.

        Args:
          path, vars, optimizer, progress: as of `dump`; `vars` may be some of the dump's tables.
          verify: "before": every byte that is needed is checked before the first row changes, which reads the files
            twice. "during": reads once; damage may be found after some rows have changed.

        Returns:
          The dump, closed: `step` and `extra` as given to dump, `optimizer.name`, `.iterations` and `.hyperparameters`.

        Raises as `dump` does, and ValueError for a finite number that a table's narrower dtype does not hold. With
        verify="before" nothing has changed then.
        """
        self.check_between_steps("load")
        return load_variables(
            path,
            lambda: self.describe(vars, optimizer),
            group=self.group(),
            verify=verify,  # type: ignore[arg-type]
            progress=progress,
        )

    def track_changes(self, vars: Any) -> None:
        """Keeps, from now on, the time at which each row of the tables changes last: 8 bytes a row beside the table.

        What counts as a change: a step of OptimizerWrapper, DistributedOptimizer or this package's optimizers that
        names the row (whatever its gradient is), `assign`, `load` and `load_incremental`. In TensorFlow also the
        variable's own methods (``table.scatter_nd_update(...)``, ``table[1:3].assign(...)``) and what uses them, as
        Keras's optimizers do; not seen are ``tf.raw_ops`` on its handle, and so optimizers of tf.compat.v1.train and
        tf_keras.optimizers.legacy unless OptimizerWrapper runs them: ``table.scatter_add`` of zeros to the rows makes
        them count. In PyTorch every row counts as changed after any other change in place (load_state_dict,
        ``table.copy_(...)``), `load` among them; one through ``table.data`` is not seen. At the beginning every row
        counts as changed now: what happened before is not known. A second call changes nothing. Of tables in a layer of
        dist_model_parallel that all ranks hold, or that look up by themselves, a copy is kept: their rows count as
        changed when a call finds that they differ.

        Args:
          vars: as of `dump`. In a tf.compat.v1 graph with a default session.

        Raises:
          TypeError: something that is no table.
          RuntimeError: inside a tf.function, or in a graph without a default session.
        """
        self.check_between_steps("track_changes")
        for table in self.tables(vars):
            table.track()

    def incremental_model_dump(self, vars: Any, time_threshold: incremental.Thresholds) -> tuple[list[Any], list[Any]]:
        """The rows that changed since a moment, those of all ranks together.

        Called by every rank with the same tables, between steps. A table that is not tracked is from this call on
        (`track_changes`), and this first call gives all of its rows: which of them changed before is not known. So a
        server that follows begins like this:

            sok.track_changes(tables)
            sok.dump(path, tables)                      # the server loads it once
            since = datetime.datetime.now(datetime.timezone.utc)
            ... steps ...
            asked, since = since, datetime.datetime.now(datetime.timezone.utc)  # before the call: nothing falls between
            keys, values = sok.incremental_model_dump(tables, asked)

        Time is the UTC clock of the host whose rank holds the row, read when the change is made; the earliest threshold
        that a rank gives counts for all. Where clocks differ or are set back, ask from a little earlier than that
        difference: a row that is applied twice does no harm. A step captured in a CUDA graph has the time of its
        capture.

        Args:
          vars: as of `dump`.
          time_threshold: a timezone-aware datetime.datetime, or a list with one for each table; rows that changed at
            this time or later.

        Returns:
          (keys, values), lists with an entry a table: [n] int64 global keys, ascending, and [n, dimension] rows, those
          of bfloat16 tables as float32. `save_incremental` writes them, `load_incremental` applies them. The same on
          every rank; each holds all of it.

        Raises, on all ranks when on one:
          TypeError, ValueError: something that is no table; a threshold that is no datetime, or a naive one.
          RuntimeError: before init(), inside a tf.function, or in a tf.compat.v1 graph without a default session.
          sparse_operation_kit.checkpoint.PeerError: another rank failed.
        """
        self.check_between_steps("incremental_model_dump")
        return incremental.collect(lambda: self.tables(vars), time_threshold, self.group())

    def save_incremental(
        self,
        path: str | os.PathLike[str],
        vars: Any,
        keys: Sequence[Any],
        values: Sequence[Any],
        *,
        step: int | None = None,
        extra: Any = None,
    ) -> None:
        """Writes what incremental_model_dump returned to the directory `path`, for load_incremental of either frontend.

        One rank calls it, since each holds all rows. The directory is a checkpoint (docs/FORMAT.md): it appears whole
        or not at all, its checksums are verified when it is loaded, and the command-line tool reads it.

        Args:
          path: a directory; a checkpoint that is there is replaced.
          vars: the tables of incremental_model_dump, which give the names.
          keys, values: as it returned them.
          step, extra: an integer and plain JSON data of the caller's, kept in the manifest.

        Raises:
          TypeError, ValueError: what does not fit the tables; OSError: what the file system refuses. Nothing is left.
        """
        incremental.save(path, self.tables(vars), keys, values, step=step, extra=extra, frontend=self.version)

    def load_incremental(self, path_or_arrays: Any, vars: Any) -> None:
        """Overwrites rows of tables by what incremental_model_dump gave on other ranks, or in the other frontend.

        Called by every rank with the same tables; each takes the rows that it holds, and a dynamic table makes those
        that it lacks. Other rows and optimizer states stay as they are: the copy is for serving. Everything is checked
        on all ranks before the first row changes.

        Args:
          path_or_arrays: the directory of save_incremental (or any checkpoint whose keys fit), which all ranks see; or
            (keys, values) as incremental_model_dump returned them, on every rank.
          vars: as of `dump`: tables are found by name in a directory, by position in arrays.

        Raises, on all ranks when on one; nothing has changed then:
          TypeError, ValueError: something that is no table; arrays of another shape or dtype, keys outside the table or
            twice (sparse_operation_kit.checkpoint.KeysError); a dynamic table that evicts nothing has no room
            (sparse_operation_kit.checkpoint.MismatchError).
          RuntimeError: as incremental_model_dump.
          Otherwise what sparse_operation_kit.checkpoint raises.
        """
        self.check_between_steps("load_incremental")
        incremental.apply(path_or_arrays, lambda: self.tables(vars), self.group())

    def increments(self, vars: Any, *, number: int = 0, series: str | None = None) -> Increments:
        """Cuts what happens to tables from now on into numbered increments, which copies follow: rows that changed, and
        the keys that dynamic tables gave up, whatever for. A copy finds out where one is missing.

        Called by every rank with the same tables, between steps. Where they are trained:

            changes = sok.increments(tables)
            sok.dump(path, tables)
            ... steps ...
            changes.save("changes/1")  # and so on

        and where a copy follows, at its own pace:

            sok.load(path, copies)
            following = sok.increments(copies)
            following.load("changes/1")

        Copies may begin with a later dump, and the number of the increment that was saved right before it, with no step
        between: an increment does not name keys that came and went since the one before. Tables are tracked
        (`track_changes`), and of a dynamic one each rank keeps the keys that it held, 8 bytes each. Times and what
        counts as a change are as of `incremental_model_dump`.

        Args:
          vars: as of `dump`.
          number, series: of the last increment that was saved, or loaded, as the result has them; to go on after a
            restart.

        Raises, on all ranks when on one: TypeError and ValueError for a number that is no integer or negative, and a
        series that is no string or empty; otherwise as `track_changes` and `dump`.
        """

        def describe(what: str) -> tuple[Group, Sequence[HeldTable]]:
            self.check_between_steps(what)
            group = self.group()
            self.settle()
            return group, self.tables(vars)

        return Increments(describe, self.version, number, series)

    def export_for_serving(
        self,
        path: str | os.PathLike[str],
        vars: Any,
        *,
        dtype: str = "float32",
        min_norm: float | None = None,
        min_score: int | None = None,
        progress: bool | None = None,
    ) -> dict[str, int]:
        """Writes keys and rows of tables for servers, without states: all rows, or those that matter.

        Called by every rank with the same tables; each writes its rows. A path that ends in .safetensors becomes one
        file, with the tensors ``NAME/key`` [n] int64 and ``NAME/emb_vector`` [n, dimension] for each table. Any other
        becomes a directory with a folder NAME for each table, a model as HugeCTR's HPS loads it: ``key``, int64, and
        ``emb_vector``, float32, bare. NAME is the table's name, its punctuation replaced by "_". It appears whole or
        not at all, and nothing may be at `path`.

        Args:
          path: on a file system that all ranks see.
          vars: as of `dump`.
          dtype: "float32"; of .safetensors also "float16", rounded to nearest, or "int8" with a tensor ``NAME/scale``
            [n] float32: an element x is there as q with |x - q scale| <= scale / 2.
          min_norm: leaves out rows of a smaller L2 norm. A row with a NaN has no norm, and is written.
          min_score: leaves out rows that the table's evict_strategy ranks lower: "lfu" by how often a row was used,
            "customized" as you ranked it, "epoch_lru" by the epoch of its last use, "epoch_lfu" by 2^20 times the epoch
            plus the uses; "lru" ranks all rows 0. Tables that do not evict are written whole.
          progress: as of `dump`.

        Returns:
          How many rows of each table were written, by its name; those of all ranks.

        Raises, on all ranks when on one; nothing is at `path` then:
          RuntimeError: as `dump`.
          TypeError, ValueError: something that is no table; another dtype, or one that HPS does not read; a row that
            float16 or int8 does not hold; a threshold that is no number, or a negative one; min_score where no table
            evicts.
          Otherwise what sparse_operation_kit.checkpoint raises (ValueError and OSError).
        """
        self.check_between_steps("export_for_serving")
        group = self.group()

        choice = serving.Choice(dtype, min_norm, min_score)

        folders: list[str] = []

        def describe_tables() -> Any:
            choice.check_thresholds()
            folders.append(folder_of(path))
            return self.describe(vars, None)

        shards, _ = describe_together(describe_tables, group)
        gather(shards, group, folders[0])

        def describe() -> list[Source]:
            return [source_of(shard, None) for shard in shards]

        with alone(shard.held.stored for shard in shards):
            return serving.export_for_serving(path, describe, choice, group=group, progress=progress)

    def expire(
        self,
        var: Any,
        *,
        min_norm: float | None = None,
        min_score: int | None = None,
        max_age: float | None = None,
        max_idle: int | None = None,
        predicate: Predicate | None = None,
    ) -> Array:
        """Gives up rows of this rank's part of a dynamic table, with all that belongs to them: those that one of the
        arguments names. Between steps; a gradient of one of them is refused from then on.

        The other ranks are not asked: each calls it for its own rows, when it likes. Rows are read in pieces; memory is
        needed for some of them and the keys that go.

        Args:
          var: a dynamic table.
          min_norm: rows of a smaller L2 norm go. A row with a NaN has no norm, and stays.
          min_score: rows that the table's evict_strategy ranks lower go, ranks as of `export_for_serving`: "lfu" how
            often a row was used, "customized" as you ranked it.
          max_age: rows go that no lookup in training has used for so many seconds, to a second, or a 64th of
            time_to_live.
          max_idle: rows go that none of the table's last so many changes has used: a lookup in training is one, and so
            are `assign` and a call that erases.
          predicate: a function of keys [n] int64, rows [n, dimension] of the table's dtype (bfloat16 as float32) and
            scores [n] int64 as of `min_score`, or None where the table has none, that returns booleans [n]: which of
            them go. All NumPy arrays, which it may change. Called for some rows at a time. It must not use the table.

        Returns:
          The keys that went, [n] int64, a NumPy array.

        Raises, and gives nothing up:
          TypeError: something that is no dynamic table; a wrong argument.
          ValueError: no argument, or a negative one; min_score, max_age or max_idle of a table without evict_strategy
            and time_to_live; booleans of another shape.
          RuntimeError: before init(), inside a tf.function, or in a tf.compat.v1 graph without a default session.
          What the predicate raises.
        """
        self.check_between_steps("expire")
        self.group()
        self.settle()
        table, *others = self.tables([var])
        if others or not gives_up_keys(table):
            raise TypeError(f"var must be a sok.DynamicVariable, and table '{table.name}' is static")
        choice = Expiry(min_norm, min_score, max_age, max_idle, predicate)
        choice.check(table)
        with alone([table.stored]):
            keys = choice.of(table)
            for first in range(0, len(keys), dynamic.KEYS_OF_CALL):
                table.give_up(keys[first : first + dynamic.KEYS_OF_CALL])
        return keys
