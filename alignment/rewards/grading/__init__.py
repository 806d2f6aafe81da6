"""The grader: whether a final answer equals the ground truth. None of it evaluates text.

    text.py -> reading.py -> compare.py -> (notation that reading.py refuses) math-verify

`text.py` brings spelling to one form by the rules of `rewrites.py`; `answers.py` holds the kinds of
answers; `reading.py` reads their structure, `bounds.py` regions in words, `quantities.py` and
`expressions.py` the rest, by the regular expressions of `patterns.py` and the names of
`notation.toml`; `values.py` evaluates, with `residues.py` for numbers too large for it;
`measures.py` converts units; `progressions.py` compares solutions with a period; `boxes.py` finds
what a text with boxes states; `compare.py` decides; `cascade.py` orders the stages and asks
math-verify.
"""
