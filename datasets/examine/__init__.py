"""What is found in the images of a data set: before training, under a limit of time, and by check_data.py in all.

`findings.py` has a row for each kind. `names.py`, `headers.py` and `copies.py` find them, each by a function that calls
`Findings.add`. `training.py` says what a training shows of them; `tools/check_data` decodes all images before it asks.
"""
