"""From prompts to scored rollouts: the prompts, refills, groups, sources. It never computes a loss
or changes a weight."""
