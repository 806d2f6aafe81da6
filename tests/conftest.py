"""Imported before any test module, so that the package can set OpenMP's waiting policy before torch is loaded."""

import alignment  # noqa: F401
