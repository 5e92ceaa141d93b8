# SPDX-License-Identifier: Apache-2.0
"""The PyTorch side of test_checkpoint.py; see checkpoint_matrix.py."""

import checkpoint_matrix as matrix
import torch
from torch import optim

import sparse_operation_kit.torch as sok
from sparse_operation_kit.optimizers import slot_name_of_torch

RATE, BETAS = matrix.LEARNING_RATE, (matrix.ADAMS["beta_1"], matrix.ADAMS["beta_2"])
MAKE = {
    "SGD": lambda p: optim.SGD(p, RATE, momentum=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, RATE, initial_accumulator_value=0.125, eps=1e-12),
    "RowWiseAdagrad": lambda p: sok.RowWiseAdagrad(RATE, 0.125).attach(p),
    "Adam": lambda p: optim.Adam(p, RATE, BETAS, eps=1e-12),
    "AdamW": lambda p: optim.AdamW(p, RATE, BETAS, eps=1e-12, weight_decay=0.125),
    "Adamax": lambda p: optim.Adamax(p, RATE, BETAS, eps=1e-12),
    "Adadelta": lambda p: optim.Adadelta(p, RATE, rho=0.75, eps=1e-6),
    "RMSprop": lambda p: optim.RMSprop(p, RATE, alpha=0.75, eps=1e-12, momentum=0.5, centered=True),
    "Ftrl": lambda p: sok.Ftrl(RATE, l1_regularization_strength=0.125).attach(p),
    "amsgrad": lambda p: optim.Adam(p, RATE, BETAS, eps=1e-12, amsgrad=True),
}


def key_of(name, slot):
    return "max_exp_avg_sq" if slot == "vhat" else slot_name_of_torch("Adam" if name == "amsgrad" else name, slot)


class Frontend:
    name = "torch"
    sok = sok

    def __init__(self):
        self.rank, self.num_ranks = sok.rank(), sok.num_ranks()

    def table(self, name, shape, mode):
        return sok.Variable(shape=shape, mode=mode, name=name)

    def dynamic(self, name, dimension, mode, **options):
        return sok.DynamicVariable(dimension, mode=mode, name=name, **options)

    def dense(self):
        return torch.nn.Parameter(torch.zeros(3))

    def optimizer(self, name, variables):
        return sok.OptimizerWrapper(MAKE[name](variables))

    def touch(self, variables, optimizer):
        optimizer.zero_grad()
        ids = [(torch.tensor([0]), torch.tensor([0, 1])) for _ in variables]
        sum(output.sum() for output in sok.lookup_sparse(variables, ids, combiners=["sum"] * len(ids))).backward()
        optimizer.step()

    def step(self, variables, optimizer, batches):
        optimizer.zero_grad()
        ids = [(torch.from_numpy(keys), torch.from_numpy(splits)) for keys, splits, _ in batches]
        outputs = sok.lookup_sparse(variables, ids, combiners=["mean", "sum"][: len(ids)])
        loss = sum(((o - torch.from_numpy(b[2])) ** 2).sum() for o, b in zip(outputs, batches, strict=True))
        loss.backward()
        optimizer.step()
        return float(sok.communication.allreduce(loss.detach().double()))

    def put(self, variable, array):
        variable.detach().copy_(torch.from_numpy(array))

    def get(self, variable):
        return variable.detach().numpy()

    def put_state(self, optimizer, variable, name, slot, array):
        self.get_state(optimizer, variable, name, slot)[...] = array

    def get_state(self, optimizer, variable, name, slot):
        return optimizer.state[variable][key_of(name, slot)].numpy()

    def count(self, optimizer, variable):
        step = optimizer.state[variable].get("step")
        return None if step is None else int(step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("gloo")
    sok.init()
    matrix.main(Frontend())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
