# SPDX-License-Identifier: Apache-2.0
"""The policies of dynamic tables (../dynamic_policies.py) in PyTorch."""

import copy

import numpy as np
import torch
from dynamic_policies import Calls, Expiry, Follow, Kept, Policies

import sparse_operation_kit.torch as sok


class PyTorch(Calls):
    sok = sok

    def options(self, options):
        return {key: torch.float16 if value == "float16" else value for key, value in options.items()}

    def static(self, rows):
        return sok.Variable(torch.from_numpy(rows), name="static")

    def optimizer(self, kind, tables, rate):
        make = torch.optim.SGD if kind == "sgd" else torch.optim.Adagrad
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
            other = self.make(**options)
            torch.nn.ParameterDict({"t": other}).load_state_dict(torch.load(tmp_path / "s")["table"])
            return other

        return {"copy": lambda table, options: copy.deepcopy(table), "state_dict": saved}


class TestFollow(PyTorch, Follow):
    pass
