"""What torchrun tells the processes that it starts. This module loads no tensor library, so that commands can ask it first."""

import os

VARIABLES = """RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE
TORCHELASTIC_ERROR_FILE""".split()


def is_follower() -> bool:
    """Whether torchrun has started this process as another rank than 0."""
    return int(os.environ.get("RANK", "0")) > 0


def may_have_started_before(named: bool) -> bool:
    """Whether this command may have begun its run already: torchrun starts all ranks again after one is lost, of which only
    the machine that lost it is told. So behind torchrun a run that is `named` goes on where it exists."""
    return "TORCHELASTIC_RUN_ID" in os.environ and (named or int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0)


def ranks_here() -> int:
    """How many processes torchrun has started on this machine; 0 where there is no torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
