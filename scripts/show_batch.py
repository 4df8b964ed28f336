#!/usr/bin/env python3
"""Draw the first training images of a run as the model sees them."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
