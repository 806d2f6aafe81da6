"""The grader: whether a final answer equals the ground truth.

    text.py -> reading.py -> compare.py -> (notation that reading.py refuses) workers.py and ask_math_verify.py

`text.py` brings spelling to one form, `answers.py` reads structure, `expressions.py` reads what stands inside, `values.py`
evaluates it, `compare.py` decides, `cascade.py` puts the stages in order. None of them evaluates text.
"""
