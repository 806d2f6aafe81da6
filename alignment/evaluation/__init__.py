"""The accuracy of a model with intervals, pass@k, and comparisons of models. It never trains."""
