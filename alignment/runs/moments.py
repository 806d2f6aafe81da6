"""Are the optimiser's moments in a checkpoint more than zeros?"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

ROWS = 64  # of a tensor, that are read: most of a checkpoint's bytes are moments


def zero_moments(folder: Path) -> bool:
    """Whether the moments of the optimiser's state in `folder` are all 0, or none is there, as far
    as the first rows of each tensor show. False where the folder has no file of tensors, or one of
    a type that numpy lacks."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no mapping
                if name.endswith(".step") or not tensors.get_slice(name).get_shape():
                    continue
                try:
                    stored = tensors.get_slice(name)
                    first = stored[: min(ROWS, stored.get_shape()[0])]
                except (TypeError, SafetensorError):
                    return False
                if first.any():
                    return False
    return bool(files)
