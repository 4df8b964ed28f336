"""What is found in the images of a data set: before training, under a limit of time, and by check_data.py in all.

`findings.py` has a row for each kind. `names.py`, `headers.py` and `copies.py` find them, with `Findings.add`.
`training.py` looks at a sample, and says what it shows in the sentences of `words.py`.
"""
