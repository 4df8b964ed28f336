"""Models built from settings. `models/weights` loads pretrained weights."""
