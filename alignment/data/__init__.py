"""Data: `tasks/`, where problems and demonstrations come from; `prompts/`, their templates; and the embedded models.

Nothing here grades, samples or trains, and `tasks` and `prompts` load no heavy library on import.
"""
