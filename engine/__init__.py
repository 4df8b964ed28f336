"""How training happens: precision, optimiser, one update, the loop, evaluation, checkpoints."""
