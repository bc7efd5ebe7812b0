"""Files and folders: everything that creates, syncs, renames, publishes, locks or removes them."""
