"""The arguments of the commands, a dataclass for each concern, and how a command line and a preset
fill them. A flag says all that is known of it at its field. Nothing here loads a model."""
