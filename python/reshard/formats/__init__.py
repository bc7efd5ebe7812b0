"""What is on disk, a module a format. Names of files and JSON fields are known here and nowhere else.

In reading order: `opened_folder` (a folder's entries by handle); `checkpoint2` (names, tracker), `checkpoint2_common`
(common.json), `checkpoint2_shards` (which rank stores which shard), `checkpoint2_metadata` (metadata.json); `tiles`
(tiles.json: what metadata.json cannot say); `manifest` (the commit record and the sums of everything beside it) and
`scrub`, `proofs` (what was verified); `state` and `state_loader` (a trainer's own state); `save_log` and `metrics`;
`huggingface`; `ckpt` (weights in protobuf); `rank_file` (one rank's own weight file, of either format); `mounts` (file
systems).

Dataclasses here mirror the files. Tensors' bytes, geometry and the decision what to open are somebody else's.
"""
