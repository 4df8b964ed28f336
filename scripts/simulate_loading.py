#!/usr/bin/env python3
"""Simulate loading tar files: requests, bytes, memory; needs a checkout."""

from start import tool

if __name__ == "__main__":
    tool(__file__, "bench")
