"""Files of a model for other programs. Names here are needed before torch is imported."""

CONFIG, WEIGHTS, CARD, CURVES = "config.json", "model.safetensors", "README.md", "curves.png"
HUB_FILES = (WEIGHTS, CARD, CURVES, CONFIG)
"""Files that -to hub writes, in the order in which they get their names"""
