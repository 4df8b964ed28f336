"""What is recorded of a run: its folder, its metrics, and which of its weights are best."""
