"""The HTML pages of the commands: one file each, without a request to any other.

`html` makes a page of data, `inspect_data` the data of `reshard inspect`, `plan_data` that of `reshard plan`. The data
is JSON in the page and is drawn by the scripts beside this file. All sizes are bounded, however large a checkpoint is.
"""
