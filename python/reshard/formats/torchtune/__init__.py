"""Folders of torchtune: that of a run with its epochs, and the names of files that older versions wrote."""
