"""The grader: whether a final answer equals the ground truth.

    text.py -> reading.py -> compare.py -> (notation that reading.py refuses) workers.py and ask_math_verify.py

`text.py` brings two texts to one spelling, `reading.py` parses them into the types of `answers.py`, with formulas parsed by
`expressions.py`, `compare.py` compares these, with formulas evaluated by `values.py`, and `workers.py` runs math-verify in a
process that can be killed. `cascade.py` puts these stages in order. None of them evaluates text as code.
"""
