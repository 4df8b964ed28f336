#!/usr/bin/env python3
"""Export a trained model to ONNX, torch.export, safetensors or the Hub."""

from start import tool

if __name__ == "__main__":
    tool(__file__)
