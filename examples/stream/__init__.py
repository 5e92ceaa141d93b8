# SPDX-License-Identifier: Apache-2.0
"""A stream of ids that come and go, learned with dynamic tables of bounded size."""
