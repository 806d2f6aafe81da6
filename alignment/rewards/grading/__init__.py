"""Whether two final answers say the same: reading them, comparing them, and asking math-verify safely.

    text -> answers -> compare -> (where they cannot be read) ask_math_verify, in a process that can be killed

`text.py` brings spelling to one form, `answers.py` reads structure, `expressions.py` reads what stands inside, `values.py`
evaluates it, `compare.py` decides, `cascade.py` puts the stages in order. None of them evaluates text.
"""
