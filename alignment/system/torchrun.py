"""What torchrun tells the processes that it starts. This module loads no tensor library, so that
commands can ask it first."""

import os

# Read once: rank 0 drops the variables before it starts processes of its own. 0 where there is no
# torchrun.
PROCESSES = int(os.environ.get("WORLD_SIZE", "0"))  # on all machines
PROCESSES_HERE = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # on this machine


def followed(seconds: float) -> bool:
    """Whether torchrun made this another rank than 0. It then has followed rank 0 until that ended
    or gave no answer for `seconds`."""
    if int(os.environ.get("RANK", "0")) == 0:
        return False
    from alignment.system.ranks import follow

    follow(seconds)
    return True
