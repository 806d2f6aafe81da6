"""The tasks with their problems, the prompts that put problems to a model, and models that need no download. It never
samples, scores or trains."""
