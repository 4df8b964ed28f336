#!/usr/bin/env python3
"""Find a good model for your images in a given time, and evaluate it."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
