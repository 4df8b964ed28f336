"""Confidence intervals and tests of metrics, also for images in groups. All other packages use these functions."""
