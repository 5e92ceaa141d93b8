# SPDX-License-Identifier: Apache-2.0
"""Embedding and embedding_lookup: tables that this process holds whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparse_operation_kit import placement as _placement
from sparse_operation_kit.placement import Initializer
from sparse_operation_kit.torch.dist_model_parallel.inputs import COMBINERS, as_bags, check_combiner


def embedding_lookup(param: Tensor, ids: Any, combiner: str | None = None) -> Tensor:
    """Looks up rows by id and pools those of each bag, by PyTorch's own functions.

    Args:
      param: [rows, dimension], which this process holds whole. For sharded tables see `sok.lookup_sparse`.
      ids: as of :class:`Embedding`.
      combiner: None, "sum" or "mean". An empty bag gives zeros.

    Returns:
      See :class:`Embedding`.

    Raises:
      TypeError: `param` is no tensor, or ids of another kind. ValueError: an unknown combiner, or see `Embedding`.
      IndexError, with a combiner RuntimeError: an id outside the table (on a GPU PyTorch's own assertion).
    """
    if not isinstance(param, Tensor):
        raise TypeError("param must be Tensor")
    check_combiner(combiner)
    bags = as_bags(ids, combiner, where="embedding_lookup")
    if combiner is None:
        return bags.shaped(functional.embedding(bags.values, param))
    offsets = bags.offsets.to(bags.values.dtype)
    return bags.shaped(functional.embedding_bag(bags.values, param, offsets, mode=combiner, include_last_offset=True))


class Embedding(nn.Module):
    """An embedding table and a combiner; its parameter is `embeddings` [input_dim, output_dim].

    Args:
      input_dim, output_dim: rows and width.
      initializer: as of `sok.Variable`.
      combiner: None, "sum" or "mean", over the last dimension of the ids.
      dtype, device: of the parameter; on the device "meta" nothing is allocated, which is what a
        :class:`DistributedEmbedding` needs.

    Call it with ids: a dense integer tensor, a 2-D jagged nested tensor, sparse COO tensor, ``(values, offsets)`` or an
    object with ``.values()`` and ``.offsets()``. Without a combiner a dense tensor gives ids.shape + [output_dim], the
    others (but sparse ones) a jagged nested tensor; with one a dense tensor of two dimensions or more gives all but the
    last + [output_dim], the others [n, output_dim]. An empty bag gives zeros.

    Raises:
      ValueError: sizes that are not positive, an unknown combiner, ids of one dimension with a combiner, sparse ids
        without one.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        initializer: Any = "uniform",
        combiner: str | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if input_dim <= 0 or output_dim <= 0:
            raise ValueError(f"Both input_dim and output_dim should be positive, found {input_dim} and {output_dim}")
        check_combiner(combiner)
        self.input_dim, self.output_dim, self.combiner = input_dim, output_dim, combiner
        self.initializer = initializer
        self.embeddings = nn.Parameter(torch.empty(input_dim, output_dim, dtype=dtype, device=device))
        if not self.embeddings.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the table anew, with PyTorch's generator."""
        if callable(self.initializer):
            self.initializer(self.embeddings)
            return
        spec = _placement.parse_initializer(self.initializer, self.input_dim, self.output_dim)
        if spec.kind == _placement.CONSTANT:
            nn.init.constant_(self.embeddings, spec.a)
        elif spec.kind == _placement.UNIFORM:
            nn.init.uniform_(self.embeddings, spec.a, spec.b)
        elif spec.kind == _placement.NORMAL:
            nn.init.normal_(self.embeddings, spec.a, spec.b)
        else:
            nn.init.trunc_normal_(self.embeddings, spec.a, spec.b, spec.a - 2 * spec.b, spec.a + 2 * spec.b)

    def forward(self, ids: Any) -> Tensor:
        """See the class."""
        if self.combiner is not None and isinstance(ids, Tensor) and ids.dim() == 1:
            raise ValueError("1D input with combiner is ambiguous. Please make it [batch, 1] or [1, ids]")
        return embedding_lookup(self.embeddings, ids, self.combiner)

    def extra_repr(self) -> str:
        return f"{self.input_dim}, {self.output_dim}, combiner={self.combiner!r}"


def config_of(embedding: Any) -> dict[str, Any]:
    """The config of what a DistributedEmbedding is made of.

    Raises TypeError for another kind, ValueError for options of nn.Embedding that a sharded table does not have.
    """
    weight: Tensor
    if isinstance(embedding, Embedding):
        weight = embedding.embeddings
        config = {"combiner": embedding.combiner, "embeddings_initializer": embedding.initializer}
    elif isinstance(embedding, (nn.Embedding, nn.EmbeddingBag)):
        weight = embedding.weight
        for option in ("padding_idx", "max_norm", "scale_grad_by_freq"):
            value = getattr(embedding, option, None)
            if value is not None and value is not False:  # padding_idx may be 0
                raise ValueError(f"{type(embedding).__name__} with {option} cannot be distributed")
        combiner = embedding.mode if isinstance(embedding, nn.EmbeddingBag) else None
        if combiner not in COMBINERS:
            raise ValueError(f'nn.EmbeddingBag must have the mode "sum" or "mean", got {combiner!r}')
        config = {"combiner": combiner, "embeddings_initializer": Initializer(_placement.NORMAL, 0.0, 1.0)}
    elif isinstance(embedding, (tuple, list)) and len(embedding) in (2, 3):
        rows, width, *rest = embedding
        check_combiner(rest[0] if rest else None)
        return {"input_dim": rows, "output_dim": width, "combiner": rest[0] if rest else None, "layer_type": None}
    else:
        raise TypeError(
            "embeddings are nn.Embedding, nn.EmbeddingBag, Embedding or (rows, width[, combiner]), got "
            f"{type(embedding).__name__}"
        )
    rows, width = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    sizes = {"input_dim": rows, "output_dim": width, "dtype": dtype, "trainable": weight.requires_grad}
    return {**config, **sizes, "layer_type": None}
