#!/usr/bin/env python3
"""List, verify, average and strip checkpoints."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
