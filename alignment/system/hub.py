"""Whether the hub of models and data sets can be reached."""

import httpx

from alignment.system.clock import start_in_background

HUB_SECONDS = 5  # that the hub has for an answer


def wait_for_hub(address: str) -> None:
    """Return once the hub answers, whatever it answers; raise an error after `HUB_SECONDS`.
    Libraries would wait for half a minute."""
    # in a thread, because looking up the address obeys no timeout
    answer = start_in_background(lambda: httpx.head(address, timeout=HUB_SECONDS + 4, verify=False))
    answer.result(HUB_SECONDS)
