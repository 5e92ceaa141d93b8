# SPDX-License-Identifier: Apache-2.0
"""What test_checkpoint.py and its workers share: tables with known bits, batches, and the comparisons.

A worker is a process of one frontend that defines `Frontend` (see checkpoint_tensorflow.py, checkpoint_torch.py) and
calls `main`. Every rank runs all checks in the same order; rank 0 prints "passed CHECK in SECONDS" for each.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
import time

import numpy as np

FRONTENDS = ("tensorflow", "torch")
RANKS = (2, 3)  # one rank: test_each_loads_the_other; every number of ranks, in NumPy: tests/format
STEPS = 8
HALF = 4
COUNT = 3  # steps before the states get their known bits

# name -> its states. What each frontend makes of a name has the same formula, see the workers.
OPTIMIZERS = {
    "SGD": ("momentum",),
    "Adagrad": ("accumulator",),
    "RowWiseAdagrad": ("accumulator",),
    "Adam": ("m", "v"),
    "AdamW": ("m", "v"),
    "Adamax": ("m", "v"),
    "Adadelta": ("accum_grad", "accum_var"),
    "RMSprop": ("rms", "mg", "momentum"),
    "Ftrl": ("accumulator", "linear"),
    "amsgrad": ("m", "v", "vhat"),  # not fused: the framework runs it on rows
}
LEARNING_RATE = 0.0625  # exact in float32, so that both frontends write the same
ADAMS = {"beta_1": 0.5, "beta_2": 0.75}
# velocity of Keras = factor * momentum of PyTorch
MOMENTUM = {"SGD": -LEARNING_RATE, "RMSprop": LEARNING_RATE}


@dataclasses.dataclass(frozen=True)
class Table:
    name: str
    rows: int
    dimension: int
    localized: tuple[bool, ...]  # when it is written, when it is read

    def mode(self, reading, num_ranks):
        return f"localized:{num_ranks - 1}" if self.localized[reading] else "distributed"


# Small and large dimensions, few rows and more, each placement when written and when read: every second pair of them.
_SHAPES = ((1, 3), (2, 16), (23, 1), (37, 257))
_PLACES = tuple(itertools.product((False, True), repeat=2))
TABLES = tuple(
    Table(f"table/{i}{j}", *shape, places)
    for i, shape in enumerate(_SHAPES)
    for j, places in enumerate(_PLACES)
    if (i + j) % 2 == 0
)


def known(optimizer, table, what):
    """The whole array of a table's weights or of a state: every element distinct, NaN, -0 and infinity among them."""
    seed = [ord(c) for c in f"{optimizer}/{table.name}/{what}"]
    shape = (table.rows,) if optimizer == "RowWiseAdagrad" and what != "weight" else (table.rows, table.dimension)
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    array.reshape(-1)[:3] = np.array([np.nan, -0.0, np.inf], np.float32)[: array.size]
    return array


def expected(optimizer, table, what, writer, reader):
    """`known` as the reading frontend is to hold it, and whether each bit counts."""
    array = known(optimizer, table, what)
    if what != "momentum" or writer == reader:
        return array, True
    factor = MOMENTUM[optimizer] if writer == "torch" else 1 / MOMENTUM[optimizer]
    return (array.astype(np.float64) * factor).astype(np.float32), False


def same(actual, wanted, bits, message):
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, f"{message}: {actual.shape} {wanted.shape}"
    if bits:
        assert actual.tobytes() == np.ascontiguousarray(wanted).tobytes(), message
    else:
        np.testing.assert_array_equal(actual, wanted, message)


BATCH, ROWS, DIMENSIONS = 12, (40, 7), (4, 9)

STATIC, DYNAMIC = "static", "dynamic"
KINDS = (STATIC, DYNAMIC)
ON_DYNAMIC_TABLES = ("SGD", "Adam", "RowWiseAdagrad", "amsgrad")
"""The optimizers whose training goes on from each kind of table to each kind; the others do from static to static."""
EVICT_STRATEGIES = ("lru", "lfu")
EVICTING_STEPS = 40


def batch(step, table, rank, num_ranks):
    """This rank's part of a global batch: (keys, row splits, targets)."""
    generator = np.random.default_rng([step, table])
    lengths = generator.integers(0, 4, BATCH)
    splits = np.concatenate([[0], np.cumsum(lengths)])
    keys = generator.integers(0, ROWS[table], splits[-1])
    target = generator.standard_normal((BATCH, DIMENSIONS[table])).astype(np.float32)
    first, end = BATCH * rank // num_ranks, BATCH * (rank + 1) // num_ranks
    mine = splits[first : end + 1] - splits[first]
    return keys[splits[first] : splits[end]], mine.astype(np.int64), target[first:end]


def evicting_batch(step, rank):
    """Distinct ascending keys of rank 0, so that the owner locates the same ones on any number of ranks; some come
    often, most do not.
    """
    generator = np.random.default_rng([step, 77])
    keys = np.unique(generator.zipf(1.3, 3) % 1000 - 500) if rank == 0 else np.zeros(0, np.int64)
    return keys, np.arange(len(keys) + 1), np.ones((len(keys), 2), np.float32)


def where(folder, what, frontend, num_ranks, optimizer, kind=STATIC):
    suffix = "" if kind == STATIC else f"-{kind}"
    return pathlib.Path(folder) / f"{what}-{frontend}-{num_ranks}-{optimizer}{suffix}"


def kinds_of(optimizer):
    return KINDS if optimizer in ON_DYNAMIC_TABLES else (STATIC,)


class Worker:
    """The checks, over a frontend's few operations."""

    def __init__(self, frontend, folder):
        self._f, self._folder = frontend, folder
        self._place = {"rank": frontend.rank, "num_ranks": frontend.num_ranks}

    def _tables(self, reading):
        return [
            self._f.table(table.name, (table.rows, table.dimension), table.mode(reading, self._f.num_ranks))
            for table in TABLES
        ]

    def _own(self, variable, whole):
        return np.ascontiguousarray(whole[variable.placement.rows])

    # --- writing ---

    def write(self):
        """Dumps of known bits, one for each optimizer; and a training with a dump in its middle."""
        for name in OPTIMIZERS:
            variables = self._tables(reading=False)
            optimizer = self._f.optimizer(name, variables)
            for _ in range(COUNT):
                self._f.touch(variables, optimizer)
            for table, variable in zip(TABLES, variables, strict=True):
                self._f.put(variable, self._own(variable, known(name, table, "weight")))
                for slot in OPTIMIZERS[name]:
                    self._f.put_state(optimizer, variable, name, slot, self._own(variable, known(name, table, slot)))
            path = where(self._folder, "bits", self._f.name, self._f.num_ranks, name)
            self._f.sok.dump(path, variables, optimizer, step=7, extra={"name": name})
            for kind in kinds_of(name):
                self._train_and_dump(name, kind)
        for strategy in EVICT_STRATEGIES:
            self._evict_and_dump(strategy)

    def _train_and_dump(self, name, kind):
        variables = self._training_tables(kind)
        optimizer = self._f.optimizer(name, variables)
        losses = self._train(variables, optimizer, range(HALF))
        path = where(self._folder, "training", self._f.name, self._f.num_ranks, name, kind)
        pending = self._f.sok.dump_async(path, variables, optimizer, step=HALF)
        losses += self._train(variables, optimizer, range(HALF, STEPS))
        pending.wait()
        if self._f.rank == 0:
            path.with_suffix(".json").write_text(json.dumps(losses))

    def _evict_and_dump(self, strategy):
        table = self._evicting_table(strategy)
        optimizer = self._f.optimizer("Adam", [table])
        self._evict(table, optimizer, range(EVICTING_STEPS // 2))
        path = where(self._folder, "evicting", self._f.name, self._f.num_ranks, strategy)
        pending = self._f.sok.dump_async(path, table, optimizer)
        held = self._evict(table, optimizer, range(EVICTING_STEPS // 2, EVICTING_STEPS))
        pending.wait()
        if self._owns(table):
            path.with_suffix(".json").write_text(json.dumps(held))

    def _evicting_table(self, strategy):
        """On one rank, so that it holds as many rows for any number of ranks."""
        mode = f"localized:{self._f.num_ranks - 1}"
        return self._f.dynamic(f"evicting/{strategy}", 2, mode, max_capacity=9, evict_strategy=strategy)

    def _owns(self, table):
        return table.placement.owner == self._f.rank

    def _evict(self, table, optimizer, steps):
        """The keys of the table after each step, and their rows at the end."""
        held = []
        for step in steps:
            self._f.step([table], optimizer, [evicting_batch(step, self._f.rank)])
            keys, rows = (np.asarray(array) for array in self._f.sok.export(table))
            held.append(sorted(keys.tolist()))
        return held, rows[np.argsort(keys)].tolist()

    def _training_tables(self, kind=STATIC):
        if kind == DYNAMIC:
            return [self._f.dynamic(f"trained{t}", DIMENSIONS[t], None) for t in range(2)]
        return [self._f.table(f"trained{t}", (ROWS[t], DIMENSIONS[t]), None) for t in range(2)]

    def _train(self, variables, optimizer, steps):
        return [self._f.step(variables, optimizer, [batch(step, t, **self._place) for t in range(2)]) for step in steps]

    # --- reading ---

    def read(self, writer, writers):
        """The dumps of one writer: bits, counts, and the training goes on."""
        for number, name in enumerate(OPTIMIZERS):
            variables = self._tables(reading=True)
            optimizer = self._f.optimizer(name, variables)
            if number % 2:  # states are there already, or are made by load
                self._f.touch(variables, optimizer)
            path = where(self._folder, "bits", writer, writers, name)
            found = self._f.sok.load(path, variables, optimizer)
            assert (found.step, found.extra, found.world_size) == (7, {"name": name}, writers)
            for table, variable in zip(TABLES, variables, strict=True):
                message = f"{name}, {table}, from {writer} on {writers}"
                same(self._f.get(variable), self._own(variable, known(name, table, "weight")), True, message)
                for slot in OPTIMIZERS[name]:
                    whole, bits = expected(name, table, slot, writer, self._f.name)
                    actual = self._f.get_state(optimizer, variable, name, slot)
                    same(actual, self._own(variable, whole), bits, f"{message}, {slot}")
                self._check_count(optimizer, variable, name, writer, COUNT, int(number % 2))
            for stored in kinds_of(name):
                for kind in kinds_of(name):
                    self._resume(name, writer, writers, stored, kind)
        for strategy in EVICT_STRATEGIES:
            self._go_on_evicting(strategy, writer, writers)

    def _check_count(self, optimizer, variable, name, writer, stored, before):
        count = self._f.count(optimizer, variable)
        if name == "SGD" and self._f.name == "torch":
            assert count is None  # torch.optim counts none
        else:
            assert count == (before if name == "SGD" and writer == "torch" else stored), (name, writer, count)

    def _go_on_evicting(self, strategy, writer, writers):
        """The same rows go, in the same order."""
        path = where(self._folder, "evicting", writer, writers, strategy)
        table = self._evicting_table(strategy)
        optimizer = self._f.optimizer("Adam", [table])
        self._f.sok.load(path, table, optimizer)
        keys, rows = self._evict(table, optimizer, range(EVICTING_STEPS // 2, EVICTING_STEPS))
        if self._owns(table):
            wanted, wanted_rows = json.loads(path.with_suffix(".json").read_text())
            assert keys == wanted and keys[-1] != keys[0], f"{strategy} from {writer} on {writers}"
            np.testing.assert_allclose(rows, wanted_rows, rtol=1e-5, atol=1e-6)

    def _resume(self, name, writer, writers, stored, kind):
        path = where(self._folder, "training", writer, writers, name, stored)
        wanted = json.loads(path.with_suffix(".json").read_text())[HALF:]
        variables = self._training_tables(kind)
        optimizer = self._f.optimizer(name, variables)
        assert self._f.sok.load(path, variables, optimizer).step == HALF
        losses = self._train(variables, optimizer, range(HALF, STEPS))
        message = f"{name} from {stored} tables of {writer} on {writers} to {kind} ones"
        if (writer, writers, stored) == (self._f.name, self._f.num_ranks, kind):
            assert losses == wanted, message
        np.testing.assert_allclose(losses, wanted, rtol=1e-6, err_msg=message)

    def legacy(self):
        """A dump of SOK 2.x, without manifest, which test_checkpoint.py has laid out."""
        stored = np.load(pathlib.Path(self._folder) / "legacy.npz")
        variables = [self._f.table(f"old{t}", stored[f"weight{t}"].shape, None) for t in range(2)]
        optimizer = self._f.optimizer("Adam", variables)
        for t, variable in enumerate(variables):  # one table a directory, as the builder lays them out
            found = self._f.sok.load(pathlib.Path(self._folder) / f"legacy{t}", variable, optimizer)
            assert found.manifest is None and found.optimizer is None
            same(self._f.get(variable), self._own(variable, stored[f"weight{t}"]), True, f"old{t}")
            for slot in ("m", "v"):
                wanted = self._own(variable, stored[f"{slot}{t}"])
                same(self._f.get_state(optimizer, variable, "Adam", slot), wanted, True, f"old{t} {slot}")

    def errors(self):
        """What goes wrong on one rank is an error on all, and nothing has changed."""
        sok, last = self._f.sok, self._f.num_ranks - 1
        variables = self._training_tables()
        before = [self._f.get(variable).copy() for variable in variables]
        good = where(self._folder, "training", "torch", 1, "Adam")
        bad = pathlib.Path(self._folder) / "nowhere" / "dump"
        chosen = bad if self._f.rank == last else good
        if self._f.num_ranks > 1:
            self._raises(OSError, "nowhere", last, lambda: sok.load(chosen, variables))
            mine = bad if self._f.rank == last else pathlib.Path(self._folder) / f"half-{self._f.name}"
            self._raises(OSError, "nowhere", last, lambda: sok.dump(mine, variables))
            assert not (pathlib.Path(self._folder) / f"half-{self._f.name}").exists()
        given = [*variables, self._f.dense()] if self._f.rank == last else variables
        self._raises(TypeError, "filter_variables", last, lambda: sok.load(good, given))
        self._raises(TypeError, "filter_variables", last, lambda: sok.dump(bad, given))
        self._raises(ValueError, "XXH3", None, lambda: sok.load(pathlib.Path(self._folder) / "damaged", variables))
        for variable, old in zip(variables, before, strict=True):
            same(self._f.get(variable), old, True, "a failed load changed a table")

    def _raises(self, kind, message, at, call):
        """`kind` on rank `at` (None: on any), PeerError on the others, with the same message."""
        from sparse_operation_kit.checkpoint import PeerError

        try:
            call()
        except Exception as error:
            found = error
        else:
            raise AssertionError(f"no {kind.__name__}")
        assert message in str(found), str(found)
        own = kind if at == self._f.rank else (PeerError if at is not None else (kind, PeerError))
        assert isinstance(found, own), repr(found)


def main(frontend):
    """`worker.py FOLDER CHECK ...`: "write", "read:FRONTEND:RANKS", "legacy", "errors"."""
    folder, *checks = sys.argv[1:]
    worker = Worker(frontend, folder)
    for check in checks:
        start = time.monotonic()
        name, *arguments = check.split(":")
        getattr(worker, name)(*(int(word) if word.isdigit() else word for word in arguments))
        if frontend.rank == 0:
            print(f"passed {check} in {time.monotonic() - start:.1f} s", flush=True)
