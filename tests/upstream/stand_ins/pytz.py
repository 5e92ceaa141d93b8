# SPDX-License-Identifier: Apache-2.0
"""Stands in for pytz in scripts that use its `utc` alone."""

import datetime

utc = datetime.timezone.utc
