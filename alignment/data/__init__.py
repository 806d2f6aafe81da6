"""Tasks with their problems, prompts that put them to a model, and models without a download. It
never samples or trains."""
