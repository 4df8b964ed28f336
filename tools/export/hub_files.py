"""Names of the files that -to hub writes. A file of its own, so that the command line is checked without torch."""

CONFIG, WEIGHTS, CARD, CURVES = "config.json", "model.safetensors", "README.md", "curves.png"
HUB_FILES = (WEIGHTS, CARD, CURVES, CONFIG)
