#!/usr/bin/env python3
"""Requests, bytes, shuffling and memory of feeding a run from tar files, without reading an image."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
