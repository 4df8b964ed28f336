#!/usr/bin/env python3
"""Pack images into a few tar files, which load several times faster."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
