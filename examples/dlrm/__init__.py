# SPDX-License-Identifier: Apache-2.0
"""A click predictor (DLRM) trained in TensorFlow and in PyTorch from the same data and initial values."""
