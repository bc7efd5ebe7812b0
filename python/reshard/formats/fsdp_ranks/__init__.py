"""Folders of trainers that save the shards of each FSDP rank with `torch.save`, such as verl and SkyRL."""
