#!/usr/bin/env python3
"""Find the best model for your images in a given time: from a folder to a model that is evaluated on test images."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
