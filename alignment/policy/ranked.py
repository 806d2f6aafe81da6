"""A policy whose work ranks of torch.distributed share (`system/ranks.py`): rank 0's side of it."""

from collections.abc import Callable

from alignment.policy.policy import PolicyConfig
from alignment.system.ranks import lead


def on_all_ranks(method: str) -> Callable:
    """A method that calls the one of this name on every rank's part, and returns rank 0's result."""
    return lambda self, *arguments, **named: self.ranks.call(method, *arguments, **named)


def on_rank_0(method: str) -> Callable:
    """A method that calls the one of this name on rank 0's part: one that needs no other rank, and works after one is lost."""
    return lambda self, *arguments, **named: getattr(self._own, method)(*arguments, **named)


class RankedPolicy:
    """A `Policy` of several ranks, one for each of its devices. What each rank holds is a `Shard`, whose methods have the names
    and arguments of `Policy`'s. Raises `RunStopped` where a rank is lost."""

    replicated: bool

    def __init__(self, config: PolicyConfig):
        self.ranks = lead(len(config.devices), config.rank_timeout)
        self._own = self.ranks.open("alignment.policy.sharded:Shard", config, self.replicated)
        self.devices, self.dtype, self.config = config.devices, self._own.dtype, self._own.config

    @property
    def micro_batch_tokens(self) -> int:
        return self._own.micro_batch_tokens

    def model_on(self, device: str, dtype) -> None:
        return None

    accumulate, step = on_all_ranks("accumulate"), on_all_ranks("step")
    clip_gradient, drop_gradient = on_all_ranks("clip_gradient"), on_all_ranks("drop_gradient")
    gradient = on_all_ranks("gradient")
    log_probs, choose_micro_batch_tokens = on_all_ranks("log_probs"), on_all_ranks("choose_micro_batch_tokens")
    base_log_probs, use_adapters = on_all_ranks("base_log_probs"), on_all_ranks("use_adapters")
    weights, load_optimizer = on_all_ranks("weights"), on_all_ranks("load_optimizer")
    save, save_optimizer = on_all_ranks("save"), on_all_ranks("save_optimizer")


class ReplicatedPolicy(RankedPolicy):
    """Every rank holds the weights, gradient and moments; ranks share the rows, and sum their gradients."""

    replicated = True
    weights, save, save_optimizer = on_rank_0("weights"), on_rank_0("save"), on_rank_0("save_optimizer")


class ShardedPolicy(RankedPolicy):
    """Every rank of a machine holds a part of the weights, gradient and moments; each machine holds all of them."""

    replicated = False
