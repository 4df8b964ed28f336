"""Intervals, tests and what groups of images do to them: functions of numbers and arrays, which all rooms use."""
