#!/usr/bin/env python3
"""Find images whose label is probably wrong, by models that did not see the image."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
