"""What the ranks of test_ranks.py hold: python -m ranked_object WHAT prints what rank 0 sees when
rank 1 is done that harm."""

import atexit
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from alignment.system.errors import RunStopped
from alignment.system.ranks import lead


class Held:
    """A number of each rank."""

    def __init__(self, ranks, start):
        self.ranks, self.value = ranks, torch.tensor(float(start + ranks.rank))

    def total(self):
        """The sum over the ranks, by a collective."""
        dist.all_reduce(self.value)
        return self.value.item()

    def steps(self, number):
        """As many sums, of which each is a collective of its own."""
        return (self.total() for _ in range(number))

    def drawn(self):
        """The same random number on every rank, if their generators agree: else the largest."""
        number = torch.rand(1)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number.item()

    def harm(self, what):
        """Fail on rank 1; the others wait for it."""
        if self.ranks.rank == 1:
            if what == "error":
                raise ValueError("rank 1 cannot do this\nand says more")
            if what == "hang":
                time.sleep(600)
            os.kill(
                os.getpid(),
                {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}[what],
            )
        return self.total()


def main(what):
    if what == "none":
        atexit.register(lambda: print("threads at the end:", threading.active_count()))
    ranks = lead(3, timeout=5)
    held = ranks.open("ranked_object:Held", 10)
    if what == "none":
        torch.manual_seed(7)
        print(
            held.ranks.count, ranks.call("total"), list(ranks.call("steps", 2)), ranks.call("drawn")
        )
        ranks.open("ranked_object:Held", 0)
        print(ranks.call("total"))
        next(ranks.call("steps", 2))  # and no further
        print(ranks.call("total"))
        return
    if what == "end":
        ranks.call("harm", what)
        time.sleep(30)  # rank 1 tells rank 0 of its signal within this time
    start = time.monotonic()
    for call in (("harm", what), ("total",)):
        try:
            print(ranks.call(*call))
        except RunStopped as error:
            print(
                f"{error} [{'soon' if time.monotonic() - start < 30 else 'late'}]".replace(
                    "\n", " "
                )
            )


if __name__ == "__main__":
    main(sys.argv[1])
