#!/usr/bin/env python3
"""Which precision should I train in? Measured on your own model and data."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
