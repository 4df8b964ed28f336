"""What is recorded of a run: its folder, the run that it resumes, and which of its weights are best."""
