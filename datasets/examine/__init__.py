"""Examination of the images of a data set: in a limited time before training, and of all images by check_data.py.

`findings.py` has a row for each kind of finding. `names.py`, `headers.py` and `copies.py` find them, and add them to a
`Findings`. `training.py` says which of them matter to a training run. `tools/check_data` decodes all images first.
"""
