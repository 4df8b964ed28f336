#!/usr/bin/env python3
"""Predict the classes of images with a trained model."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
