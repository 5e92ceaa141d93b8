# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's DLRM shape on `dist_model_parallel`: which tables lie where, planned and trained."""
