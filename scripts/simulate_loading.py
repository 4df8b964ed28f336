#!/usr/bin/env python3
"""Requests, bytes, shuffling and memory of training from tar files, simulated."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
