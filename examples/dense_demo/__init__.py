# SPDX-License-Identifier: Apache-2.0
"""A dense embedding of nested keys before fully connected layers, by the names of SparseOperationKit 1.x."""
