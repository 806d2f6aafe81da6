"""The grader: whether a final answer equals the ground truth.

    text.py -> reading.py -> compare.py -> (notation that reading.py refuses) math-verify

`text.py` brings spelling to one form by the tables of `notation.toml`, `answers.py` holds the kinds of answers, `reading.py`
reads their structure, `quantities.py` and `expressions.py` the rest, all three by the regular expressions of `patterns.toml`;
`values.py` evaluates, `compare.py` decides, `cascade.py` puts the stages in order and asks math-verify. None evaluates text.
"""
