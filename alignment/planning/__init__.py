"""What a run will need, predicted before anything loads: which role sits on which device, the bytes
of each phase and the seconds that a card takes. It asks the kinds of policy, and loads nothing."""
