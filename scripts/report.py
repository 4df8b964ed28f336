#!/usr/bin/env python3
"""Write an HTML report of one or several runs: metrics, curves, predictions."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
