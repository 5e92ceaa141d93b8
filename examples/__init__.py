# SPDX-License-Identifier: Apache-2.0
"""Complete programs that use sparse_operation_kit."""
