#!/usr/bin/env python3
"""Check a data set: read every image once, as training does, and report defects."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
