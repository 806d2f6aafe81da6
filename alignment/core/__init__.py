"""Pure functions and frozen data of RL fine-tuning: records, tokens and masks, advantages, losses,
KL, importance weights. It never imports another room, reads or writes a file, or chooses a device.
"""
