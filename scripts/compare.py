#!/usr/bin/env python3
"""Compare settings, recipes or precisions, over several seeds or folds."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
