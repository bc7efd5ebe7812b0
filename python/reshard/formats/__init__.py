"""What is on disk: one package for each format, and what formats share.

`base` defines the interface of a format and the data that its reader returns; `registry` lists the formats. Names of
files and fields of JSON are known here and nowhere else. Dataclasses here mirror the files.
"""
