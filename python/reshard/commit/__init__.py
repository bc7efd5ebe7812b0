"""What makes a root of iterations trustworthy: how a save is published, kept, proven and removed.

It knows no format: it is told which files there are. `protocol` publishes an iteration; `claims` says who may;
`manifest` records its files and checksums; `roots` names the folders and the tracker.
"""
