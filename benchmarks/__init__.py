"""Benchmarks, run as modules. The package comes first: it sets up threads before torch is
loaded."""

import alignment  # noqa: F401
