#!/usr/bin/env python3
"""Benchmark mixed precision and vitamp's update; needs a checkout."""

from start import tool

if __name__ == "__main__":
    tool(__file__, "bench")
