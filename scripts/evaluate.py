#!/usr/bin/env python3
"""Evaluate a trained model: accuracy, recall, calibration, confusion."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
