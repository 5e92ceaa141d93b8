# SPDX-License-Identifier: Apache-2.0
"""The policies of dynamic tables (../dynamic_policies.py) in PyTorch."""

import copy
import pickle

import numpy as np
import pytest
import torch
from dict_store import DictStore
from dynamic_policies import Calls, Expiry, Follow, Policies
from kept_tables import Kept
from stored_tables import Stored

import sparse_operation_kit.torch as sok


class PyTorch(Calls):
    sok = sok

    def options(self, options):
        return {key: torch.float16 if value == "float16" else value for key, value in options.items()}

    def static(self, rows):
        return sok.Variable(torch.from_numpy(rows), name="static")

    def optimizer(self, kind, tables, rate):
        make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[kind]
        return sok.OptimizerWrapper(make(tables, lr=rate))

    def step(self, tables, keys, splits, weights, combiners, optimizer=None, **options):
        ids = (torch.tensor(keys), torch.tensor(list(splits)))
        given = None if weights is None else torch.tensor(weights, requires_grad=True)
        weighted = [given] + [None] * (len(tables) - 1)
        outputs = sok.lookup_sparse(tables, [ids] * len(tables), weighted, combiners=combiners, **options)
        if optimizer is not None:
            optimizer.zero_grad()
            sum(output.sum() for output in outputs).backward()
            optimizer.step()
        return [output.detach().numpy() for output in outputs], None if given is None else given.grad.numpy()

    def read(self, table, keys):
        with torch.no_grad():
            return np.asarray(sok.all2all_dense_embedding(table, torch.tensor(keys)))


class TestPolicies(PyTorch, Policies):
    pass


class TestExpiry(PyTorch, Expiry):
    pass


class TestKept(PyTorch, Kept):
    def copies(self, tmp_path):
        def saved(table, options):
            torch.save({"table": torch.nn.ParameterDict({"t": table}).state_dict()}, tmp_path / "s")
            other = self.another(options)
            torch.nn.ParameterDict({"t": other}).load_state_dict(torch.load(tmp_path / "s")["table"])
            return other

        return {"copy": lambda table, options: copy.deepcopy(table), "state_dict": saved}


class TestFollow(PyTorch, Follow):
    pass


class TestStored(PyTorch, Stored):
    def ids(self, keys):
        return torch.tensor(keys), torch.arange(len(keys) + 1)

    def lookups(self, table, batches):
        optimizer = sok.OptimizerWrapper(torch.optim.SGD([table], 1.0))
        total = torch.zeros(())
        for number, keys in enumerate(batches):
            total = total + (sok.lookup_sparse(table, self.ids(keys), combiners="sum") ** 2).sum()
            sok.prefetch(table, self.ids(batches[number - 1]))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()

    def copies(self, table):
        module = torch.nn.ParameterDict({"t": table})
        optimizer = sok.OptimizerWrapper(torch.optim.Adam([table]))
        self.train(table, [1], optimizer)
        return (module.state_dict, optimizer.state_dict, lambda: copy.deepcopy(table), lambda: pickle.dumps(table))

    def test_in_compiled_code(self):
        """A lookup runs between compiled parts; one graph of everything is refused."""
        tables = self.pair(DictStore(), max_capacity=4)

        def forward(table, keys):
            return sok.lookup_sparse(table, (keys * 1, torch.arange(4)), combiners="sum") * 2

        compiled = torch.compile(forward, backend="eager")
        for keys in ([1, 2, 3], [4, 5, 6], [1, 2, 6]):
            torch.testing.assert_close(
                *(run(table, torch.tensor(keys)) for run, table in zip((compiled, forward), tables, strict=True))
            )
        with torch.no_grad():
            torch.testing.assert_close(
                *(run(t, torch.arange(3)) for run, t in zip((compiled, forward), tables, strict=True))
            )
        assert tables[0].stored == 2
        with pytest.raises(Exception, match=r"that have a store, .* run between compiled parts"):
            torch.compile(lambda t: forward(t, torch.arange(3)), backend="eager", fullgraph=True)(tables[0])
