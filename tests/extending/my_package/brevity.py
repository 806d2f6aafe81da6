"""Two rewards for short responses."""


def brevity(response, ground_truth):
    """1 for an empty response, 1/2 for one of 100 characters, towards 0."""
    return 100 / (100 + len(response))


def shortest_of_prompt(prompts, completions, **columns):
    """1 for the shortest completion of each prompt, else 0; called as TRL calls a reward
    function."""
    shortest = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        shortest[prompt] = min(len(completion), shortest.get(prompt, len(completion)))
    return [
        float(len(completion) == shortest[prompt])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
