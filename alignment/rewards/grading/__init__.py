"""The grader: whether a final answer equals the ground truth.

    text.py -> reading.py -> compare.py -> (notation that reading.py refuses) math-verify

`text.py` brings spelling to one form by the tables of `notation.toml`, `answers.py` holds the kinds
of answers, `reading.py` reads their structure, `quantities.py` and `expressions.py` the rest, all
three by `patterns.toml`; `values.py` evaluates, `compare.py` decides, `cascade.py` orders the
stages and asks math-verify. None evaluates text."""
